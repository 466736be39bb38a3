"""The interface between the front ends (HTTP, gRPC) and the dispatcher, which implements it.

A generation ends exactly once: with `FinishedEvent`, or by raising a BatonError out of the
iteration. After either, it yields nothing more. Leaving the iteration early without `cancel()` is a
programming error.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.limits import ModelBounds
from baton.types import FinishReason, Principal, Request, RequestId, TokenLogprobs
from coordinator.core.common.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Logprobs of all prompt tokens but the first, which has none.

    Sent once, before the first TokensEvent, if `prompt_logprobs` is requested.
    """

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """The tokens of one message from a node, in order; never empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, or empty if not requested


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The one good end."""

    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens that the first placement did not have to compute
    timeline: Timeline


GenerationEvent = PromptLogprobsEvent | TokensEvent | FinishedEvent


class Generation(Protocol):
    """The stream of one request's events.

    Its buffer is bounded: a reader that is too slow gets SlowReader, and the request is cancelled.
    """

    @property
    def id(self) -> RequestId: ...

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    def cancel(self) -> None:
        """Cancel the request; both nodes stop computing within one step. Idempotent."""
        ...

    def stop(self) -> None:
        """End the generation normally, because the client has all that it wants.

        The stream ends with `FinishedEvent`; nodes stop computing as with `cancel`. Idempotent.
        """
        ...


class GenerationBackend(Protocol):
    """What front ends submit requests to. Runs on the coordinator's event loop."""

    def get_model_bounds(self) -> ModelBounds:
        """What bounds a request: the model's vocabulary, longest context and cache size.

        Raises ServiceUnavailable while no node has joined.
        """
        ...

    def require_admission(self, principal: Principal, count: int, timeout: float) -> None:
        """Check, before prompts are tokenized, that `count` requests could be admitted.

        `timeout` is the seconds that they have. Raises Overloaded, ShuttingDown or InvalidRequest.
        """
        ...

    async def submit_request(self, request: Request) -> Generation:
        """Admit a request.

        Raises Overloaded when it would be served too late or its tenant has used up its share,
        ServiceUnavailable when no node could serve it for 1 s, ShuttingDown while the coordinator
        stops, and InvalidRequest or ContextLengthExceeded when it could never fit.
        """
        ...

    async def submit_requests(self, requests: Sequence[Request]) -> Sequence[Generation]:
        """Admit all requests, in this order, or none. Raises the errors of `submit_request`.

        If the caller is cancelled meanwhile, so are the requests.
        """
        ...
