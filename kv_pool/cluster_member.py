"""The pool as a member of the cluster: it joins and reports like a node, but serves no requests."""

import asyncio
import os
from collections.abc import Iterable

from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.messages import (
    POOL_ROLE,
    PROTOCOL_VERSION,
    CacheSnapshotRequest,
    LedgerQuery,
    LedgerReport,
    NodeLeaving,
    NodeOrder,
    PoolJoinInfo,
    build_cache_report,
)
from baton.cluster_link.report_types import LedgerOwner, MemberLedger, NodeStats
from baton.config.pool_config import PoolConfig
from baton.kv.cache_journal import FLUSH_INTERVAL_SECONDS, MAX_HASHES_PER_BATCH, CacheEventBatch
from baton.process import log
from baton.process.clock import Clock
from baton.types import Incarnation, NodeName, mint_id
from kv_pool.core.ledger import PoolLedger
from kv_pool.peers.peer_pools import PeerPools
from kv_pool.service.pool_manager import PoolManager


def choose_member_name(config: PoolConfig) -> str:
    """The configured name of the pool, or a random one."""
    return config.name or f"{POOL_ROLE}-{mint_id(32)}"


class PoolClusterMember:
    """The membership of an open pool; nodes and other pools dial it at `endpoint`."""

    def __init__(
        self,
        config: PoolConfig,
        name: str,
        manager: PoolManager,
        peers: PeerPools,
        endpoint: str,
        clock: Clock,
    ) -> None:
        self._name = name
        self._manager = manager
        self._peers = peers
        self._endpoint = endpoint
        self._clock = clock
        self._incarnation = Incarnation("")
        self._flush_timer: asyncio.TimerHandle | None = None
        self._snapshot_task: asyncio.Task[None] | None = None
        self._link = CoordinatorLink(
            self,
            on_order=self._on_order,
            address=config.coordinator,
            token=config.cluster_token,
            silence=config.silence,
        )

    async def run(self) -> None:
        """Stay a member until cancelled. Raises ConfigError if the coordinator refuses the pool."""
        try:
            await self._link.run()
        finally:
            if self._snapshot_task is not None:
                self._snapshot_task.cancel()

    def send_leaving(self) -> None:
        self._link.send(NodeLeaving("stopping"), self._incarnation)

    async def close(self) -> None:
        """Close the link in order: the coordinator gets every message that was sent before."""
        if self._snapshot_task is not None:
            self._snapshot_task.cancel()
        await self._link.close()

    def on_index_changed(self) -> None:
        """Send the changes of the index to the coordinator within FLUSH_INTERVAL_SECONDS."""
        if self._flush_timer is None and self._link.is_joined:
            self._flush_timer = asyncio.get_running_loop().call_later(
                FLUSH_INTERVAL_SECONDS, self._send_changes
            )

    # callbacks of CoordinatorLink

    def build_join(self) -> PoolJoinInfo:
        return PoolJoinInfo(
            protocol_version=PROTOCOL_VERSION,
            name=NodeName(self._name),
            host_id=self._manager.host_id,
            endpoint=self._endpoint,
            pid=os.getpid(),
            model_digest=self._manager.open_pool.model_digest,
            layout=self._manager.open_pool.layout,
            num_blocks=self._manager.open_pool.block_pool.memory.num_blocks,
            rejoining=self._incarnation,
        )

    def build_stats(self) -> NodeStats:
        ledger = self._manager.open_pool.block_pool.ledger(self._clock())
        counts = {f"blocks_{state.value}": count for state, count in ledger.counts.items()}
        counters = (
            self._manager.open_pool.collect_counters()
            | self._peers.counters()
            | log.get_log_counters()
        )
        return NodeStats(blocks_total=ledger.num_blocks, counters=counters, device=None, **counts)

    def on_joined(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._peers.rejoin(incarnation)
        self._manager.cache_journal.restart_numbering()
        self._start_snapshot()

    def on_coordinator_lost(self) -> None:
        """Do nothing: the pool goes on serving the nodes of its host."""

    def _on_order(self, order: NodeOrder) -> None:
        match order:
            case LedgerQuery(query):
                self._link.send(self._build_ledger_report(query), self._incarnation)
            case CacheSnapshotRequest():
                self._start_snapshot()
            case _:
                pass

    # messages to the coordinator

    def _build_ledger_report(self, query_id: int) -> LedgerReport:
        ledger = self._manager.open_pool.block_pool.ledger(self._clock())
        disk = self._manager.open_pool.disk_ledger()
        return LedgerReport(
            query_id,
            self._describe_ledger(self._name, ledger),
            self._describe_ledger(f"{self._name} disk", disk) if disk is not None else None,
        )

    def _describe_ledger(self, name: str, ledger: PoolLedger) -> MemberLedger:
        return MemberLedger(
            name=name,
            incarnation=self._incarnation,
            num_blocks=ledger.num_blocks,
            counts={state.value: count for state, count in ledger.counts.items()},
            owners=tuple(
                LedgerOwner(entry.owner, entry.state.value, entry.num_blocks, entry.age_seconds)
                for entry in ledger.entries
            ),
        )

    def _send_changes(self) -> None:
        self._flush_timer = None
        self._send_cache_changes(self._manager.cache_journal.pop_events(self._clock()))

    def _start_snapshot(self) -> None:
        if self._snapshot_task is not None:
            self._snapshot_task.cancel()
        self._snapshot_task = asyncio.get_running_loop().create_task(self._send_snapshot())

    async def _send_snapshot(self) -> None:
        """Send all block hashes in parts, the next one only when the last one has been sent.

        A million hashes take half a second to collect; the event loop runs other work after each
        part.
        """
        journal, total = (
            self._manager.cache_journal,
            self._manager.open_pool.block_pool.memory.num_blocks,
        )
        journal.begin_snapshot()
        for first in range(0, max(1, total), MAX_HASHES_PER_BATCH):
            hashes = self._manager.open_pool.list_block_hashes(first, first + MAX_HASHES_PER_BATCH)
            self._send_cache_changes(
                [journal.build_snapshot_part(hashes, self._clock(), first=first == 0)]
            )
            await self._link.wait_until_flushed()
        self._send_cache_changes(journal.end_snapshot(self._clock()))

    def _send_cache_changes(self, batches: Iterable[CacheEventBatch]) -> None:
        for batch in batches:
            self._link.send(build_cache_report(batch), self._incarnation)
