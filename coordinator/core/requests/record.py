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
    """One try at serving a request on a prefill node, a decode node or both."""

    key: AttemptKey
    prefill: Incarnation | None  # the node that it was given to
    decode: Incarnation | None
    trace: AttemptTrace
    legs: set[Incarnation] = field(default_factory=set)  # nodes that still work on it
    prefill_report: PrefillEnded | None = None
    decode_report: DecodeStarted | None = None
    is_handed_off: bool = False
    is_committed: bool = False  # decode runs it
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # those received so far
    # decode's, until the prompt's logprobs are complete
    buffered_tokens: list[TokenEvent] = field(default_factory=list)
    transport: str = ""
    is_counted: bool = False  # its prompt tokens are in the counters
    reserve_deadline: float | None = None  # when decode must have reserved or refused

    @property
    def node_pair(self) -> NodePair | None:
        """The prefill and decode node of its hand-off; None if it takes none."""
        return (
            (self.prefill, self.decode)
            if self.prefill is not None and self.decode is not None
            else None
        )

    @property
    def computing_node(self) -> Incarnation | None:
        """The node that computes the prompt, and so its logprobs."""
        return self.prefill or self.decode


@dataclass(slots=True)
class RequestRecord:
    """The coordinator's state of one request; times are on the brain's clock."""

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
    # set until the request is accepted: no node can serve it yet
    admit_deadline: float | None = None
    # set while it backs off, out of the queue, after repeated failures
    retry_at: float | None = None
    avoided_nodes: frozenset[Incarnation] = frozenset()  # nodes of the last failed attempt
    # further choices of the same answer, if it is the first choice
    sibling_requests: tuple[RequestId, ...] = ()
    # decode node that got the whole prompt by another request
    prefix_holder: Incarnation | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # complete, or None
    token_sources: TokenSources | None = None
    replace_reason: str = ""  # error code or "refused", of the last attempt that was replaced
    # class charged for computing the context again: the preemptor's; "": its own
    prefill_charged_class: str = ""
    held_back_seconds: float = 0.0  # by the retry budget, since its last attempt
    # for a probe, the node out of service that it must go through
    probe_node: Incarnation | None = None
    # prompt tokens that some cache had then
    cached_at_first_placement: int = 0
    # None until placement was tried
    prompt_block_hashes: PromptBlockHashes | None = None
    # model identity at admission: only nodes of that identity may serve it
    identity_digest: bytes = b""

    @property
    def tenant_class(self) -> str:
        """The class label of metrics."""
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
        """Prompt logprobs were asked for and are incomplete: no token may be emitted yet."""
        return self.request.sampling.prompt_logprobs is not None and self.prompt_logprobs is None

    def nodes_to_avoid(
        self, attempt: Attempt, members: Container[Incarnation]
    ) -> frozenset[Incarnation]:
        """Return the nodes that the next attempt should avoid: those that have left, or else all
        that took part in this attempt. Once decode has committed, the prefill node no longer takes
        part, and what it computed is in decode's cache."""
        writing = not attempt.is_committed or self.awaits_prompt_logprobs
        nodes = frozenset(filter(None, (attempt.prefill if writing else None, attempt.decode)))
        return frozenset(node for node in nodes if node not in members) or nodes

    def begin_attempt(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.attempt_history.append(attempt)
        if len(self.attempt_history) > MAX_ATTEMPT_HISTORY:
            del self.attempt_history[MAX_ATTEMPT_HISTORY // 2]

    def make_attempt_spec(self, key: AttemptKey, now: float) -> AttemptSpec:
        """Return what is left to do, as nodes receive it for this attempt."""
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
        """Return the next moment at which a deadline of the request passes."""
        due = self.deadline
        if self.admit_deadline is not None:
            due = min(due, self.admit_deadline)
        if self.retry_at is not None:
            due = min(due, self.retry_at)
        if self.attempt is not None and self.attempt.reserve_deadline is not None:
            due = min(due, self.attempt.reserve_deadline)
        return due
