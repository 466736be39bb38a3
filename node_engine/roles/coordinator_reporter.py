"""Messages of a node to the coordinator. Called on the compute thread, sent on the event loop.

Each message carries the incarnation under which its work was assigned, so that the coordinator
recognises and drops stale ones.
"""

from collections.abc import Callable, Iterable, Sequence

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError
from baton.kv.cache_journal import CacheEventBatch
from baton.pb import cluster_pb2, common_pb2
from baton.types import AttemptKey, Incarnation, NodeName, Ticket, TokenEvent, TokenLogprobs
from node_engine.core.blocks.block_ownership import BlockLedger

_LOGPROBS_PER_MESSAGE = 4096  # about 1 MiB with 20 alternatives each


class CoordinatorReporter:
    """Builds and sends the messages of one node about its attempts, cache and blocks."""

    def __init__(self, name: NodeName, send: Callable[[cluster_pb2.NodeMessage], None]) -> None:
        self.name = name
        self._send = send
        self.incarnation = Incarnation("")  # set by the role when the node has joined

    def report_reserved(self, key: AttemptKey, ticket: Ticket | None, held_tokens: int) -> None:
        message = cluster_pb2.Reserved(key=wire.attempt_key_to_pb(key), held_tokens=held_tokens)
        if ticket is not None:
            message.ticket.CopyFrom(wire.ticket_to_pb(ticket))
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, reserved=message))

    def report_refused(self, key: AttemptKey, needed: int, free: int) -> None:
        message = cluster_pb2.Refused(key=wire.attempt_key_to_pb(key), needed=needed, free=free)
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, refused=message))

    def report_tokens(self, events: Sequence[TokenEvent]) -> None:
        message = cluster_pb2.Tokens(tokens=[wire.token_event_to_pb(event) for event in events])
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, tokens=message))

    def report_prompt_logprobs(
        self, key: AttemptKey, first_position: int, scores: Sequence[TokenLogprobs]
    ) -> None:
        """Report logprobs of consecutive prompt tokens from `first_position` on."""
        for begin in range(0, len(scores), _LOGPROBS_PER_MESSAGE):
            message = cluster_pb2.PromptScores(
                key=wire.attempt_key_to_pb(key),
                first=first_position + begin,
                scores=[
                    wire.logprobs_to_pb(score)
                    for score in scores[begin : begin + _LOGPROBS_PER_MESSAGE]
                ],
            )
            self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, prompt_scores=message))

    def report_failed(self, key: AttemptKey, error: BatonError, caused_by: str = "") -> None:
        """`caused_by`: for a preemption, the tenant class that took the blocks."""
        message = cluster_pb2.AttemptFailed(
            key=wire.attempt_key_to_pb(key), error=wire.error_to_pb(error), caused_by=caused_by
        )
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, failed=message))

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
        message = cluster_pb2.PrefillEnded(
            key=wire.attempt_key_to_pb(key),
            computed_tokens=computed_tokens,
            cached_tokens=cached_tokens,
            pooled_tokens=pool_tokens,
            remote_tokens=remote_pool_tokens,
            compute_seconds=compute_seconds,
            share_seconds=share_seconds,
        )
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, prefill_ended=message))

    def report_handed_off(self, key: AttemptKey, report: common_pb2.HandoffReport) -> None:
        message = cluster_pb2.HandedOff(key=wire.attempt_key_to_pb(key), report=report)
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, handed_off=message))

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
        message = cluster_pb2.Admitted(
            key=wire.attempt_key_to_pb(key),
            computed_tokens=computed_tokens,
            cached_tokens=cached_tokens,
            pooled_tokens=pool_tokens,
            remote_tokens=remote_pool_tokens,
            received_tokens=received_tokens,
            share_seconds=share_seconds,
        )
        self._send(cluster_pb2.NodeMessage(incarnation=self.incarnation, admitted=message))

    def report_cache_changes(self, changes: Iterable[CacheEventBatch]) -> None:
        for change in changes:
            self._send(wire.cache_events_to_pb(change, self.incarnation))

    def report_ledger(self, query_id: int, snapshot: BlockLedger) -> None:
        counts = {state.value: count for state, count in snapshot.counts.items()}
        owners = (
            (entry.owner, entry.state.value, entry.num_blocks, entry.age_seconds)
            for entry in snapshot.entries
        )
        self._send(
            wire.ledger_to_pb(
                query_id, self.name, self.incarnation, snapshot.num_blocks, counts, owners
            )
        )
