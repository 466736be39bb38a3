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

`Timestamps` says where its time went. The time to the first token is cut at four moments, each no
earlier than the one before and no later than the first token, so that the stages are a partition of
it whatever arrives, in whatever order, or never:

    moment   arrival     placed        reserved      prefill_ended      committed          token
    stage          queue       reserve        prefill           transfer      first_token

`placed` is the last placement before the first token. Prefill computes while decode reserves, and
layers travel while prefill computes: a stage is the part that was exposed. `committed` is when the
coordinator first hears of the commit, from either node. Where decode computes the prompt itself
there is no transfer, and `prefill` lasts until the token.

`count_token_sources` counts where the prompt tokens of an attempt came from, once for each attempt.
Tokens that a later attempt computes again are counted separately.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.cluster_link.report_types import HandoffReport
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    NodeName,
    Request,
    RequestId,
    TokenEvent,
    TokenLogprobs,
)
from coordinator.core.common.counters import INTERNAL_CLASS, Counters
from coordinator.core.common.timeline import Timeline
from coordinator.core.membership.prefix_directory import PromptBlockHashes
from coordinator.core.placement.breakers import NodePair
from coordinator.core.requests.attempt_trace import AttemptTrace
from coordinator.core.requests.token_sources import (
    TokenSources,
    compute_token_sources,
    count_computed_tokens,
    exclude_own_tokens,
)

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
class Timestamps:
    """Moments of one request; None has not happened in its last attempt."""

    arrival: float
    grammar_seconds: float = 0.0  # before the arrival; see Request
    placed: float | None = None
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    first_token: float | None = None
    prefill_node: NodeName | None = None
    decode_node: NodeName | None = None
    handoff_report: HandoffReport | None = None
    # digests of the models that its nodes announced, each once
    models: list[str] = field(default_factory=list)

    def mark_placed(
        self, now: float, prefill: NodeName, decode: NodeName, models: Iterable[str] = ()
    ) -> None:
        """Note when, and on which nodes, an attempt of the request was placed.

        Until its first token, the time of earlier attempts counts as time in the queue.
        """
        self.prefill_node, self.decode_node = prefill, decode
        self.models += [model for model in dict.fromkeys(models) if model not in self.models]
        if self.first_token is None:
            self.placed, self.reserved, self.prefill_ended, self.committed, self.handoff_report = (
                now,
                None,
                None,
                None,
                None,
            )

    def mark_moment(self, moment: str, now: float) -> None:
        """Set the moment if it is not set and no token has been emitted."""
        if self.first_token is None and getattr(self, moment) is None:
            setattr(self, moment, now)

    def mark_handoff_skipped(self) -> None:
        """Decode computes the rest of the prompt itself, so there is no transfer."""
        if self.first_token is None:
            self.prefill_ended = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    def build_timeline(self, now: float, attempts: int) -> Timeline:
        end = now if self.first_token is None else self.first_token
        placed = end if self.placed is None else self.placed
        ended = end if self.prefill_ended is None else self.prefill_ended
        edges = [self.arrival]
        for moment in (placed, self.reserved, ended, self.committed, end):
            edges.append(edges[-1] if moment is None else min(max(moment, edges[-1]), end))
        queue, reserve, prefill, transfer, first_token = (edges[i + 1] - edges[i] for i in range(5))
        return Timeline(
            queue=queue,
            reserve=reserve,
            prefill=prefill,
            transfer=transfer,
            first_token=first_token,
            ttft=queue + reserve + prefill + transfer + first_token,
            total=now - self.arrival,
            attempts=attempts,
            prefill_node=self.prefill_node or "",
            decode_node=self.decode_node or "",
            handoff=self.handoff_report,
            models=tuple(self.models),
            grammar=self.grammar_seconds,
        )


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
