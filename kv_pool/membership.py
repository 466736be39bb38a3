"""The pool as a member of the cluster: nothing is placed on it, but it answers for itself as a node does."""

import asyncio
import os
from collections.abc import Iterable

from baton import log, wire
from baton.cache_journal import INTERVAL, MAX_NAMES, CacheChange
from baton.clock import Clock
from baton.config import Config
from baton.coordinator_link import CoordinatorLink
from baton.pb import cluster_pb2
from baton.types import Incarnation
from kv_pool.core.ledger import PoolLedger
from kv_pool.host import PoolHost
from kv_pool.peers import Peers

ROLE = "pool"


class Membership:
    """Of an open pool. `endpoint` is where nodes and other pools dial it."""

    def __init__(self, config: Config, name: str, host: PoolHost, peers: Peers, endpoint: str, clock: Clock) -> None:
        self._name = name
        self._host = host
        self._peers = peers
        self._endpoint = endpoint
        self._clock = clock
        self._incarnation = Incarnation("")
        self._telling: asyncio.TimerHandle | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._link = CoordinatorLink(
            self, address=config.coordinator, token=config.cluster_token, silence=config.silence
        )

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError when the coordinator refuses this pool."""
        try:
            await self._link.run()
        finally:
            if self._snapshot is not None:
                self._snapshot.cancel()

    def leaving(self) -> None:
        leaving = cluster_pb2.Leaving(reason="stopping")
        self._link.send(cluster_pb2.NodeMessage(incarnation=self._incarnation, leaving=leaving))

    def changed(self) -> None:
        """The index is not what was told."""
        if self._telling is None and self._link.joined:
            self._telling = asyncio.get_running_loop().call_later(INTERVAL, self._tell_changes)

    # as a member

    def join(self) -> cluster_pb2.Join:
        return cluster_pb2.Join(
            protocol_version=wire.PROTOCOL_VERSION,
            name=self._name,
            role=ROLE,
            host_id=self._host.host_id,
            transfer_endpoint=self._endpoint,
            pid=os.getpid(),
            model_digest=self._host.digest,
            layout=wire.layout_to_pb(self._host.layout),
            num_blocks=self._host.pool.memory.total,
            rejoining=self._incarnation,
        )

    def stats(self) -> cluster_pb2.NodeStats:
        ledger = self._host.pool.ledger(self._clock())
        counts = {f"blocks_{state.value}": count for state, count in ledger.counts.items()}
        counters = self._host.all_counters() | self._peers.counters() | log.counters()
        return cluster_pb2.NodeStats(blocks_total=ledger.total, counters=counters, **counts)

    def joined(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._peers.rejoin(incarnation)
        self._host.journal.restart()
        self._tell_all()

    def coordinator_lost(self) -> None:
        """Its nodes are none of its business."""

    def told(self, message: cluster_pb2.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "ledger_query":
                self._link.send(self._ledger(message.ledger_query.query))
            case "cache_query":
                self._tell_all()
            case _:
                pass

    # telling

    def _ledger(self, query: int) -> cluster_pb2.NodeMessage:
        told = self._account(query, self._name, self._host.pool.ledger(self._clock()))
        slots = self._host.disk_ledger()
        if slots is not None:
            told.ledger.disk.CopyFrom(self._account(query, f"{self._name} disk", slots).ledger.ledger)
        return told

    def _account(self, query: int, name: str, ledger: PoolLedger) -> cluster_pb2.NodeMessage:
        counts = {state.value: count for state, count in ledger.counts.items()}
        owners = ((one.holder, one.state.value, one.blocks, one.age) for one in ledger.entries)
        return wire.ledger_to_pb(query, name, self._incarnation, ledger.total, counts, owners)

    def _tell_changes(self) -> None:
        self._telling = None
        self._send(self._host.journal.take(self._clock()))

    def _tell_all(self) -> None:
        if self._snapshot is not None:
            self._snapshot.cancel()
        self._snapshot = asyncio.get_running_loop().create_task(self._tell_in_parts())

    async def _tell_in_parts(self) -> None:
        """A million names are half a second of work: others have the loop after each part, and no part is made before
        the last one is on its way."""
        journal, total = self._host.journal, self._host.pool.memory.total
        journal.begin_snapshot()
        for first in range(0, max(1, total), MAX_NAMES):
            names = self._host.names(first, first + MAX_NAMES)
            self._send([journal.take_part(names, self._clock(), first=first == 0)])
            await self._link.flushed()
        self._send(journal.end_snapshot(self._clock()))

    def _send(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            self._link.send(wire.cache_to_pb(change, self._incarnation))
