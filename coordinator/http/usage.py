"""How many tokens an answer took, in OpenAI's words."""

import msgspec

from coordinator.answer import Answer


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


def usage_of(answer: Answer) -> Usage:
    """Complete when its last piece has been told."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(answer.cached_tokens))


def usage_so_far(answer: Answer, untold: int = 0) -> Usage:
    """In the middle of a stream, without the last `untold` tokens. Cached tokens are known at the end only."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens - untold
    return Usage(prompt, completion, prompt + completion, None)
