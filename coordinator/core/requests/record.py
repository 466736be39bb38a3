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

`compute_token_sources` says where the prompt tokens of one attempt came from, each counted once.
`count_token_sources` adds them to the counters, once for each attempt. Tokens that a later attempt
computes again are counted separately.
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    Request,
    RequestId,
    TokenEvent,
    TokenLogprobs,
)
from coordinator.core.common.counters import INTERNAL_CLASS, Counters
from coordinator.core.membership.prefix_directory import PromptBlockHashes
from coordinator.core.placement.breakers import NodePair
from coordinator.core.requests.attempt_trace import AttemptTrace, Timestamps


class TokenSources(NamedTuple):
    """Numbers of prompt tokens; the field names are values of the metric label `source`."""

    computed_prefill: int
    computed_decode: int
    local_cache: int
    pool: int
    remote_pool: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.local_cache + self.pool + self.remote_pool


def compute_token_sources(
    ended: PrefillEnded | None, admitted: DecodeStarted | None
) -> TokenSources:
    """Compute where the prompt tokens of one attempt came from, from the reports of both nodes.

    Tokens that decode had cached count as cached even if prefill had to compute them to reach what
    decode lacked. Where a cache and the pool both have a prefix, the cache is counted first. No
    number is negative, whatever nodes report.
    """
    if admitted is None:
        if ended is None:
            return TokenSources(0, 0, 0, 0, 0)
        pooled = min(ended.pool_tokens, ended.cached_tokens)
        remote = min(ended.remote_pool_tokens, pooled)
        return TokenSources(
            ended.computed_tokens, 0, ended.cached_tokens - pooled, pooled - remote, remote
        )
    cached_there = max(0, ended.cached_tokens - admitted.cached_tokens) if ended else 0
    received_cached = min(cached_there, admitted.received_tokens)
    received_pooled = min(received_cached, ended.pool_tokens) if ended else 0
    pooled = min(admitted.pool_tokens, admitted.cached_tokens)
    remote = min(
        pooled + received_pooled,
        max(admitted.remote_pool_tokens, ended.remote_pool_tokens if ended else 0),
    )
    return TokenSources(
        computed_prefill=admitted.received_tokens - received_cached,
        computed_decode=admitted.computed_tokens,
        local_cache=admitted.cached_tokens - pooled + received_cached - received_pooled,
        pool=pooled + received_pooled - remote,
        remote_pool=remote,
    )


def exclude_own_tokens(found: TokenSources, known: int, *, prefill: bool) -> TokenSources:
    """Remove cache hits that an earlier attempt of the same request may have produced.

    `known` is what caches had of the prompt at the first placement. Hits beyond it count as
    computed, by a prefill node if `prefill`.
    """
    beyond = max(0, found.cached_tokens - known)
    counts = found._asdict()
    for source in (
        "remote_pool",
        "pool",
        "local_cache",
    ):  # a prefix begins in the cache and ends in the pool
        own = min(beyond, counts[source])
        counts[source] -= own
        beyond -= own
        counts["computed_prefill" if prefill else "computed_decode"] += own
    return TokenSources(**counts)


def count_computed_tokens(ended: PrefillEnded | None, admitted: DecodeStarted | None) -> int:
    """Return the tokens that any node computed."""
    return (ended.computed_tokens if ended else 0) + (admitted.computed_tokens if admitted else 0)


MAX_ATTEMPT_HISTORY = 16  # attempts that are remembered: the first half and the last


class RequestState(Enum):
    """The states of a request; see the automaton above."""

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
        """Return the remaining work of the request, as nodes receive it for this attempt."""
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


def count_token_sources(
    record: RequestRecord, attempt: Attempt, counters: Counters, *, last: bool = False
) -> None:
    """Count an attempt once: when both nodes have reported, or at its end (`last`)."""
    complete = attempt.decode_report is not None and (
        attempt.prefill is None or attempt.prefill_report is not None
    )
    known = attempt.decode_report is not None or attempt.prefill_report is not None
    if attempt.is_counted or not (complete or (last and known)):
        return
    attempt.is_counted = True
    if record.token_sources is None:
        record.token_sources = compute_token_sources(attempt.prefill_report, attempt.decode_report)
        if attempt.key.attempt_number > 1:
            by_prefill = attempt.prefill is not None
            record.token_sources = exclude_own_tokens(
                record.token_sources, record.cached_at_first_placement, prefill=by_prefill
            )
        for source, tokens in (
            record.token_sources._asdict().items() if not record.is_internal else ()
        ):
            counters.prompt_tokens[source] += tokens
    else:
        recomputed = count_computed_tokens(attempt.prefill_report, attempt.decode_report)
        counters.recomputed_tokens[record.replace_reason] += recomputed
