"""What the front doors (HTTP, gRPC) see of the brain. Implemented by `dispatcher.py`.

A generation ends exactly once: with `FinishedEvent`, or by raising a BatonError out of the
iteration. After either it yields nothing more. Leaving the iteration early without `cancel()` is a
programming error.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.limits import ModelBounds
from baton.pb.common_pb2 import Timeline
from baton.types import (
    DEFAULT_PRINCIPAL,
    FinishReason,
    Principal,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request before it has an id. `timeout_seconds` in seconds; `cache_salt` and
    `principal` come from the credential, never from the body alone.

    `choice_index` is its number among the choices of one request, which its noise depends on.
    `leader_id` is a request of the same prompt: this one is placed once that one's prompt is in a
    decode node's cache, on that node, so that the prompt is computed once and its blocks are
    shared; if that cannot be, it is placed like any other."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_seconds: float
    cache_salt: bytes = b""
    choice_index: int = 0
    leader_id: RequestId | None = None
    principal: Principal = DEFAULT_PRINCIPAL


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """The scores of all prompt tokens but the first, which has none. Once, before the first Delta,
    if `prompt_logprobs` asks for them."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens that one message brought, in order: never empty. `logprobs` has one for each if
    `logprobs` asks for them, else it is empty."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The one good end."""

    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens that the first placement did not have to compute
    timeline: Timeline


GenerationEvent = PromptLogprobsEvent | TokensEvent | FinishedEvent


class Generation(Protocol):
    """One request's stream of events. Its buffer is bounded: a reader too slow for it gets
    SlowReader and the request is cancelled."""

    @property
    def id(self) -> RequestId: ...

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    def cancel(self) -> None:
        """The client is gone. Idempotent; compute stops within one step on both nodes."""
        ...

    def stop(self) -> None:
        """The client has all that it wants: the generation ends well. What is left to read ends
        with `FinishedEvent`; compute stops as with `cancel`. Idempotent."""
        ...


class GenerationBackend(Protocol):
    """The brain's public face. Everything runs on the coordinator's one event loop."""

    def get_model_bounds(self) -> ModelBounds:
        """Of the joined cluster. Raises Unavailable (with retry_after) while no node has joined."""
        ...

    def require_admission(self, standing: Principal, count: int, timeout: float) -> None:
        """Whether `count` requests with `timeout` seconds would be let in, as far as can be said
        before their prompts are tokenized. Raises Overloaded, Draining or InvalidRequest."""
        ...

    async def submit_request(self, submission: Submission) -> Generation:
        """Admit a request. Raises Overloaded when it would be served too late or its tenant has had
        its share, Unavailable when no node could serve it for 1 s, Draining at shutdown,
        InvalidRequest/TooLong when it could never fit."""
        ...

    async def submit_requests(self, submissions: Sequence[Submission]) -> Sequence[Generation]:
        """Admit all of them, in this order, or none: `submit_request`'s errors, and then nothing is
        held. Without an `after` of its own, a submission comes after the one before it that has the
        same prompt and the first of its choices. If the caller is cancelled meanwhile, so are
        they."""
        ...
