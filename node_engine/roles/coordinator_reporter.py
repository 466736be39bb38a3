"""Reports of a node to the coordinator. Called on the compute thread, sent on the event loop.

Each report carries the incarnation under which its work was assigned, so that the coordinator
recognises and drops stale ones.
"""

from collections.abc import Callable, Iterable, Sequence

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    DecodeStarted,
    HandoffCompleted,
    LedgerReport,
    NodeReport,
    PrefillEnded,
    PromptLogprobsReport,
    ReservationRefused,
    StepTokens,
    build_cache_report,
)
from baton.cluster_link.report_types import (
    HandoffReport,
    LedgerOwner,
    MemberLedger,
    VerifiedDraft,
)
from baton.errors import BatonError
from baton.kv.cache_journal import CacheEventBatch
from baton.types import AttemptKey, Incarnation, NodeName, Ticket, TokenEvent, TokenLogprobs
from node_engine.core.blocks.block_records import BlockLedger

_LOGPROBS_PER_MESSAGE = 4096  # about 1 MiB with 20 alternatives each


class CoordinatorReporter:
    """Sends the reports of one node about its attempts, cache and blocks."""

    def __init__(
        self, name: NodeName, send: Callable[[NodeReport | LedgerReport, Incarnation], None]
    ) -> None:
        self.name = name
        self._send = send
        self.incarnation = Incarnation("")  # set by the role when the node has joined

    def report_reserved(self, key: AttemptKey, ticket: Ticket | None, held_tokens: int) -> None:
        self._send_report(BlocksReserved(key, ticket, held_tokens))

    def report_refused(self, key: AttemptKey, needed: int, free: int) -> None:
        self._send_report(ReservationRefused(key, needed, free))

    def report_tokens(
        self, events: Sequence[TokenEvent], drafts: Sequence[VerifiedDraft] = ()
    ) -> None:
        self._send_report(StepTokens(tuple(events), tuple(drafts)))

    def report_prompt_logprobs(
        self, key: AttemptKey, first_position: int, scores: Sequence[TokenLogprobs]
    ) -> None:
        """Report logprobs of consecutive prompt tokens from `first_position` on."""
        for begin in range(0, len(scores), _LOGPROBS_PER_MESSAGE):
            part = tuple(scores[begin : begin + _LOGPROBS_PER_MESSAGE])
            self._send_report(PromptLogprobsReport(key, first_position + begin, part))

    def report_failed(self, key: AttemptKey, error: BatonError, caused_by: str = "") -> None:
        """`caused_by`: for a preemption, the tenant class that took the blocks."""
        self._send_report(AttemptFailed(key, error, caused_by))

    def report_prefill_ended(
        self,
        key: AttemptKey,
        *,
        computed_tokens: int,
        cached_tokens: int,
        compute_seconds: float,
        share_seconds: float,
        pool_tokens: int = 0,
        remote_pool_tokens: int = 0,
    ) -> None:
        """Report that prefill has ended.

        `pool_tokens` of the `cached_tokens` came from the shared pool, `remote_pool_tokens` of
        these from another host's pool. `compute_seconds` is the duration of the steps that computed
        the prompt, `share_seconds` the prompt's share of it.
        """
        ended = PrefillEnded(
            key,
            computed_tokens,
            cached_tokens,
            compute_seconds=share_seconds,
            pool_tokens=pool_tokens,
            remote_pool_tokens=remote_pool_tokens,
            step_seconds=compute_seconds,
        )
        self._send_report(ended)

    def report_handed_off(self, key: AttemptKey, report: HandoffReport) -> None:
        self._send_report(HandoffCompleted(key, report))

    def report_admitted(
        self,
        key: AttemptKey,
        *,
        computed_tokens: int,
        cached_tokens: int,
        received_tokens: int,
        pool_tokens: int = 0,
        remote_pool_tokens: int = 0,
        share_seconds: float = 0.0,
    ) -> None:
        """Report that decode begins, and where the KV of the context came from.

        `pool_tokens` of the `cached_tokens` came from the shared pool, `remote_pool_tokens` of
        these from another host's pool.
        """
        started = DecodeStarted(
            key,
            computed_tokens,
            cached_tokens,
            received_tokens,
            compute_seconds=share_seconds,
            pool_tokens=pool_tokens,
            remote_pool_tokens=remote_pool_tokens,
        )
        self._send_report(started)

    def report_cache_changes(self, changes: Iterable[CacheEventBatch]) -> None:
        for change in changes:
            self._send_report(build_cache_report(change))

    def report_ledger(self, query_id: int, snapshot: BlockLedger) -> None:
        ledger = MemberLedger(
            name=self.name,
            incarnation=self.incarnation,
            num_blocks=snapshot.num_blocks,
            counts={state.value: count for state, count in snapshot.counts.items()},
            owners=tuple(
                LedgerOwner(entry.owner, entry.state.value, entry.num_blocks, entry.age_seconds)
                for entry in snapshot.entries
            ),
        )
        self._send_report(LedgerReport(query_id, ledger))

    def _send_report(self, report: NodeReport | LedgerReport) -> None:
        self._send(report, self.incarnation)
