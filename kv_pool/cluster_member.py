"""The pool as a member of the cluster: nothing is placed on it, but it answers for itself as a node
does."""

import asyncio
import os
from collections.abc import Iterable

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.config.settings import Config
from baton.kv.cache_journal import FLUSH_INTERVAL_SECONDS, MAX_HASHES_PER_BATCH, CacheEventBatch
from baton.pb import cluster_pb2
from baton.process import log
from baton.process.clock import Clock
from baton.types import Incarnation
from kv_pool.core.ledger import PoolLedger
from kv_pool.peers.peer_pools import PeerPools
from kv_pool.service.pool_manager import PoolManager

POOL_ROLE = "pool"


class PoolClusterMember:
    """Of an open pool. `endpoint` is where nodes and other pools dial it."""

    def __init__(
        self,
        config: Config,
        name: str,
        host: PoolManager,
        peers: PeerPools,
        endpoint: str,
        clock: Clock,
    ) -> None:
        self._name = name
        self._manager = host
        self._peers = peers
        self._endpoint = endpoint
        self._clock = clock
        self._incarnation = Incarnation("")
        self._flush_timer: asyncio.TimerHandle | None = None
        self._snapshot_task: asyncio.Task[None] | None = None
        self._link = CoordinatorLink(
            self, address=config.coordinator, token=config.cluster_token, silence=config.silence
        )

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError when the coordinator refuses this pool."""
        try:
            await self._link.run()
        finally:
            if self._snapshot_task is not None:
                self._snapshot_task.cancel()

    def send_leaving(self) -> None:
        leaving = cluster_pb2.Leaving(reason="stopping")
        self._link.send(cluster_pb2.NodeMessage(incarnation=self._incarnation, leaving=leaving))

    def on_index_changed(self) -> None:
        """The index is not what was told."""
        if self._flush_timer is None and self._link.is_joined:
            self._flush_timer = asyncio.get_running_loop().call_later(
                FLUSH_INTERVAL_SECONDS, self._send_changes
            )

    # as a member

    def build_join(self) -> cluster_pb2.Join:
        return cluster_pb2.Join(
            protocol_version=wire.PROTOCOL_VERSION,
            name=self._name,
            role=POOL_ROLE,
            host_id=self._manager.host_id,
            transfer_endpoint=self._endpoint,
            pid=os.getpid(),
            model_digest=self._manager.model_digest,
            layout=wire.layout_to_pb(self._manager.layout),
            num_blocks=self._manager.block_pool.memory.num_blocks,
            rejoining=self._incarnation,
        )

    def build_stats(self) -> cluster_pb2.NodeStats:
        ledger = self._manager.block_pool.ledger(self._clock())
        counts = {f"blocks_{state.value}": count for state, count in ledger.counts.items()}
        counters = (
            self._manager.collect_counters() | self._peers.counters() | log.get_log_counters()
        )
        return cluster_pb2.NodeStats(blocks_total=ledger.num_blocks, counters=counters, **counts)

    def on_joined(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._peers.rejoin(incarnation)
        self._manager.cache_journal.restart_numbering()
        self._start_snapshot()

    def on_coordinator_lost(self) -> None:
        """Its nodes are none of its business."""

    def on_message(self, message: cluster_pb2.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "ledger_query":
                self._link.send(self._ledger_answer(message.ledger_query.query))
            case "cache_query":
                self._start_snapshot()
            case _:
                pass

    # telling

    def _ledger_answer(self, query: int) -> cluster_pb2.NodeMessage:
        told = self._ledger_message(
            query, self._name, self._manager.block_pool.ledger(self._clock())
        )
        slots = self._manager.disk_ledger()
        if slots is not None:
            told.ledger.disk.CopyFrom(
                self._ledger_message(query, f"{self._name} disk", slots).ledger.ledger
            )
        return told

    def _ledger_message(self, query: int, name: str, ledger: PoolLedger) -> cluster_pb2.NodeMessage:
        counts = {state.value: count for state, count in ledger.counts.items()}
        owners = (
            (one.owner, one.state.value, one.num_blocks, one.age_seconds) for one in ledger.entries
        )
        return wire.ledger_to_pb(query, name, self._incarnation, ledger.num_blocks, counts, owners)

    def _send_changes(self) -> None:
        self._flush_timer = None
        self._send_cache_changes(self._manager.cache_journal.pop_events(self._clock()))

    def _start_snapshot(self) -> None:
        if self._snapshot_task is not None:
            self._snapshot_task.cancel()
        self._snapshot_task = asyncio.get_running_loop().create_task(self._send_snapshot())

    async def _send_snapshot(self) -> None:
        """A million names are half a second of work: others have the loop after each part, and no
        part is made before the last one is on its way."""
        journal, total = self._manager.cache_journal, self._manager.block_pool.memory.num_blocks
        journal.begin_snapshot()
        for first in range(0, max(1, total), MAX_HASHES_PER_BATCH):
            names = self._manager.list_block_hashes(first, first + MAX_HASHES_PER_BATCH)
            self._send_cache_changes(
                [journal.build_snapshot_part(names, self._clock(), first=first == 0)]
            )
            await self._link.wait_until_flushed()
        self._send_cache_changes(journal.end_snapshot(self._clock()))

    def _send_cache_changes(self, changes: Iterable[CacheEventBatch]) -> None:
        for change in changes:
            self._link.send(wire.cache_events_to_pb(change, self._incarnation))
