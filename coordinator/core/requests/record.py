"""One request's state, and the automaton that it follows.

submit
  |
  v      place            blocks set aside            first token
QUEUED --------> PLACED --------------------> RESERVED ----------> STREAMING ------> FINISHED
  ^                |  |                          |                  ^    |   last
  |                |  +--- first token, no blocks needed elsewhere -+    |   token
  |                |       (prefill alone or EOS; colocated)             |
  +--- re-place ---+-----------------------------+-----------------------+

any of the first four ------ deadline, cancel, error that no other attempt can mend ------> FAILED
any of the first four ------ its reader has all that it wants ----------------------------> FINISHED
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    Request,
    RequestId,
    TokenEvent,
    TokenLogprobs,
)
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.common.messages import DecodeStarted, PrefillEnded
from coordinator.core.common.prompt_block_hashes import PromptBlockHashes
from coordinator.core.placement.breakers import NodePair
from coordinator.core.requests.attempt_trace import AttemptTrace
from coordinator.core.requests.timeline import Timestamps
from coordinator.core.requests.token_sources import TokenSources

MAX_ATTEMPT_HISTORY = 16  # attempts that are remembered: the first half and the last


class RequestState(Enum):
    QUEUED = "queued"
    PLACED = "placed"
    RESERVED = "reserved"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"


TERMINAL_STATES = frozenset({RequestState.FINISHED, RequestState.FAILED})

_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.PLACED, *TERMINAL_STATES}),
    RequestState.PLACED: frozenset(
        {RequestState.RESERVED, RequestState.STREAMING, RequestState.QUEUED, *TERMINAL_STATES}
    ),
    RequestState.RESERVED: frozenset(
        {RequestState.STREAMING, RequestState.QUEUED, *TERMINAL_STATES}
    ),
    RequestState.STREAMING: frozenset({RequestState.QUEUED, *TERMINAL_STATES}),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(slots=True)
class Attempt:
    """One try. `legs` are the nodes that still work on it; `prefill` and `decode` those that it was
    given to. `prompt_logprobs` are those that have come, `buffered_tokens` tokens of decode that
    wait for the rest of them."""

    key: AttemptKey
    prefill: Incarnation | None
    decode: Incarnation | None
    trace: AttemptTrace
    legs: set[Incarnation] = field(default_factory=set)
    prefill_report: PrefillEnded | None = None
    decode_report: DecodeStarted | None = None
    is_handed_off: bool = False
    is_committed: bool = False  # decode runs it
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    buffered_tokens: list[TokenEvent] = field(default_factory=list)
    transport: str = ""
    is_counted: bool = False  # its prompt tokens are in the books
    reserve_deadline: float | None = None  # decode must have said Reserved or Refused by then

    @property
    def node_pair(self) -> NodePair | None:
        """Between whom a hand-off is, if it takes one."""
        return (
            (self.prefill, self.decode)
            if self.prefill is not None and self.decode is not None
            else None
        )

    @property
    def computing_node(self) -> Incarnation | None:
        """The node that computes the prompt, and so its scores."""
        return self.prefill or self.decode


@dataclass(slots=True)
class RequestRecord:
    """`admit_deadline` is set while nobody could serve the request: it is not accepted yet. Times
    on the brain's clock.

    `prefix_holder` is a decode node whose cache has the prompt, because another request brought it
    there. `prompt_logprobs` are complete, or None if they are not or nobody asked.
    `sibling_requests` are those that came in with it, if it is the first of them: further choices
    of one answer. `probe_node`: a node out of service that this request, a probe, is to go
    through."""

    request: Request
    deadline: float
    timestamps: Timestamps
    is_internal: bool
    state: RequestState = RequestState.QUEUED
    emitted_token_ids: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    attempt_count: int = 0
    attempt_history: list[Attempt] = field(default_factory=list)
    failure_count: int = 0
    admit_deadline: float | None = None
    retry_at: float | None = (
        None  # it rests, out of the queue, after attempts that failed one upon the other
    )
    avoided_nodes: frozenset[Incarnation] = frozenset()
    sibling_requests: tuple[RequestId, ...] = ()
    prefix_holder: Incarnation | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    token_sources: TokenSources | None = None
    replace_reason: str = ""
    prefill_charged_class: str = (
        ""  # class that pays for computing the context again: who preempted the last attempt
    )
    held_back_seconds: float = 0.0  # seconds, by the retry budget, since its last attempt
    probe_node: Incarnation | None = None
    cached_at_first_placement: int = (
        0  # tokens of its prompt that some cache seemed to have when it was first placed
    )
    prompt_block_hashes: PromptBlockHashes | None = (
        None  # of the prompt's blocks, once placement has been tried
    )
    identity_digest: bytes = (
        b""  # digest of the identity that it was admitted under: nothing else may answer it
    )

    @property
    def tenant_class(self) -> str:
        """Its class in metrics."""
        return INTERNAL_CLASS if self.is_internal else self.request.principal.tenant_class

    @property
    def remaining_tokens(self) -> int:
        return self.request.sampling.max_tokens - len(self.emitted_token_ids)

    @property
    def context_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.emitted_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the prompt and of the longest output that was asked for."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """The prompt's scores were asked for and are not complete: nothing may be shown yet."""
        return self.request.sampling.prompt_logprobs is not None and self.prompt_logprobs is None

    def nodes_to_avoid(
        self, attempt: Attempt, members: Container[Incarnation]
    ) -> frozenset[Incarnation]:
        """Whom the next attempt had better avoid: a node that is no more, else all that had a part
        in this one. Once decode runs it, its writer has none any more, and what it computed is in
        its cache."""
        writing = not attempt.is_committed or self.awaits_prompt_logprobs
        nodes = frozenset(filter(None, (attempt.prefill if writing else None, attempt.decode)))
        return frozenset(node for node in nodes if node not in members) or nodes

    def begin_attempt(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.attempt_history.append(attempt)
        if len(self.attempt_history) > MAX_ATTEMPT_HISTORY:
            del self.attempt_history[MAX_ATTEMPT_HISTORY // 2]

    def make_attempt_spec(self, key: AttemptKey, now: float) -> AttemptSpec:
        """What is left to do, as nodes are told for this attempt."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and not self.awaits_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)  # so that it may use caches
        left = replace(self.request, sampling=sampling, timeout_seconds=self.deadline - now)
        return AttemptSpec(
            key,
            left,
            tuple(self.emitted_token_ids),
            self.prefill_charged_class,
            self.identity_digest,
        )

    def set_state(self, state: RequestState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise AssertionError(
                f"request {self.request.id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

    def next_timer_at(self) -> float:
        """The next moment at which time alone changes something for this request."""
        due = self.deadline
        if self.admit_deadline is not None:
            due = min(due, self.admit_deadline)
        if self.retry_at is not None:
            due = min(due, self.retry_at)
        if self.attempt is not None and self.attempt.reserve_deadline is not None:
            due = min(due, self.attempt.reserve_deadline)
        return due
