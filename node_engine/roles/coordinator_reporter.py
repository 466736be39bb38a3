"""Reports of a node to the coordinator. Called on the compute thread, sent on the event loop.

Each report carries the incarnation under which its work was assigned, so that the coordinator
recognises and drops stale ones.
"""

from collections.abc import Callable, Iterable, Sequence

from baton.cluster_link.messages import (
    LedgerReport,
    NodeReport,
    PromptLogprobsReport,
    build_cache_report,
)
from baton.cluster_link.report_types import LedgerOwner, MemberLedger
from baton.kv.cache_journal import CacheEventBatch
from baton.types import AttemptKey, Incarnation, TokenLogprobs
from node_engine.core.blocks.block_ownership import BlockLedger

_LOGPROBS_PER_MESSAGE = 4096  # about 1 MiB with 20 alternatives each


class CoordinatorReporter:
    """Sends the reports of one node about its attempts, cache and blocks."""

    def __init__(
        self, name: str, send: Callable[[NodeReport | LedgerReport, Incarnation], None]
    ) -> None:
        self._name = name
        self._send = send
        self.incarnation = Incarnation("")  # set by the role when the node has joined

    def send_report(self, report: NodeReport) -> None:
        self._send(report, self.incarnation)

    def report_prompt_logprobs(
        self, key: AttemptKey, first_position: int, scores: Sequence[TokenLogprobs]
    ) -> None:
        """Report logprobs of consecutive prompt tokens from `first_position` on."""
        for begin in range(0, len(scores), _LOGPROBS_PER_MESSAGE):
            part = tuple(scores[begin : begin + _LOGPROBS_PER_MESSAGE])
            self.send_report(PromptLogprobsReport(key, first_position + begin, part))

    def report_cache_changes(self, changes: Iterable[CacheEventBatch]) -> None:
        for change in changes:
            self.send_report(build_cache_report(change))

    def report_ledger(self, query_id: int, snapshot: BlockLedger) -> None:
        ledger = MemberLedger(
            name=self._name,
            incarnation=self.incarnation,
            num_blocks=snapshot.num_blocks,
            counts={state.value: count for state, count in snapshot.counts.items()},
            owners=tuple(
                LedgerOwner(entry.owner, entry.state.value, entry.num_blocks, entry.age_seconds)
                for entry in snapshot.entries
            ),
        )
        self._send(LedgerReport(query_id, ledger), self.incarnation)
