"""The results of the Python API, with vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one place."""

    logprob: float  # natural logarithm
    rank: int | None  # 1 is the likeliest; None for a token that is not among those asked for
    decoded_token: str | None


# By token id: the likeliest ones at a place, best first, and the token that stands there.
LogprobsAtPosition = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int  # among the `n` answers
    text: str  # of a conversation without `reasoning` and `tool_calls`
    token_ids: list[int]
    cumulative_logprob: float | None  # the sum over `token_ids`; None without logprobs
    logprobs: list[LogprobsAtPosition] | None  # one for each token; None if not asked for
    finish_reason: str | None  # "stop" or "length", or "tool_calls" of a conversation
    stop_reason: int | str | None  # the stop string or stop token that ended it, if one did
    # Calls of tools that the model asks for, as messages of the HTTP API have them.
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str | None = None  # what the model wrote before its answer, if it marks that


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None  # None for token ids, and for a conversation
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsAtPosition | None] | None  # None for the first token
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None  # prompt tokens that were in a cache already
    error: BatonError | None = field(default=None)  # why there are no outputs


class PromptsFailed(BatonError):
    """Some prompts got no answer. The answers of the others are in `outputs`, in order."""

    code = "prompts_failed"

    def __init__(self, outputs: list[RequestOutput]) -> None:
        failed = {index: each.error for index, each in enumerate(outputs) if each.error is not None}
        first, error = next(iter(failed.items()))
        super().__init__(
            f"{len(failed)} of {len(outputs)} prompts failed, the answers of the others are in"
            f" `outputs`: prompts[{first}]: {error}"
        )
        self.outputs = outputs
        self.errors = failed  # by the index of the prompt
