"""How many tokens an answer took, in OpenAI's words."""

import msgspec

from coordinator.frontend.response_stream import ResponseStream


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


def final_usage(answer: ResponseStream) -> Usage:
    """Complete when its last piece has been told."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(answer.cached_tokens))


def partial_usage(answer: ResponseStream, untold: int = 0) -> Usage:
    """In the middle of a stream, without the last `untold` tokens. Cached tokens are known at the
    end only."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens - untold
    return Usage(prompt, completion, prompt + completion, None)
