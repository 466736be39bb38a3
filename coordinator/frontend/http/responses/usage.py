"""The token usage of a response, in OpenAI's format."""

import msgspec

from coordinator.frontend.output import ResponseStream


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


def final_usage(stream: ResponseStream) -> Usage:
    """The usage of a complete stream."""
    prompt, completion = stream.prompt_tokens, stream.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(stream.cached_tokens))


def partial_usage(stream: ResponseStream, pending_tokens: int = 0) -> Usage:
    """The usage so far, without the last `pending_tokens` tokens.

    The number of cached tokens is known at the end only.
    """
    prompt, completion = stream.prompt_tokens, stream.completion_tokens - pending_tokens
    return Usage(prompt, completion, prompt + completion, None)
