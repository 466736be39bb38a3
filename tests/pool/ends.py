"""Two pools' ends of the transfer plane in one process, over a real connection: what one fetches, the other sends."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from baton.clock import steady
from baton.connection_limits import port_limit
from baton.descriptors import descriptor_limit
from baton.failpoints import Failpoints
from baton.pb.pool_pb2_grpc import PoolLinkServicer
from baton.types import Incarnation, NodeName, PeerAddress
from kv_pool.core.chain import Chain
from kv_pool.core.eviction import Lru
from kv_pool.core.holders import Holder, Publication, PublicationId
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier
from kv_pool.link import Channels, Dialer, listening
from kv_pool.peer_service import PeerService
from kv_pool.receiver import Receiver
from kv_pool.sender import Sender
from kv_pool.store import Store
from kv_pool.terms import PoolIdentity
from kv_transfer.factory import build_inbound, build_outbound
from kv_transfer.settings import TransferSettings
from tests.pool.rig import DIGEST, LAYOUT, SALTLESS, TOKEN, content, until

PATIENT = TransferSettings(ticket_ttl=60.0, progress_timeout=60.0, close_timeout=0.2)
NODE = Holder("a node")


@dataclass
class End:
    """One pool: core, segment, both planes, and the port where the other one asks. `failpoints` are its planes' own."""

    store: Store
    pool: Pool
    receiver: Receiver
    sender: Sender
    address: PeerAddress
    failpoints: Failpoints
    server: Any
    _memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self._memory = np.frombuffer(self.store.view, dtype=np.uint8)[: len(self.store.rows) * LAYOUT.block_bytes]
        self._memory = self._memory.reshape(-1, LAYOUT.block_bytes)

    def put(self, tokens: Sequence[int], root: Any = SALTLESS) -> None:
        """As a node would publish them, with the content that follows from the tokens."""
        chain = Chain.of(root, tokens, LAYOUT.block_size)
        granted = self.pool.reserve(NODE, chain, 0, steady())
        assert granted.publication is not None
        for number, block in enumerate(granted.blocks, granted.first):
            self._memory[block] = content(tokens[: (number + 1) * LAYOUT.block_size])
        self._release(self.pool.seal(NODE, granted.publication, len(granted.blocks), steady()))

    def places(self, tokens: Sequence[int], end: int | None = None) -> tuple[PublicationId, Publication]:
        chain = Chain.of(SALTLESS, tokens, LAYOUT.block_size)
        path = self.pool.memory.index.match(chain)
        granted = self.pool.reserve(NODE, chain, len(path), steady(), end=end)
        assert granted.publication is not None
        return granted.publication, self.pool.writing(NODE, granted.publication)

    async def fetch(self, there: "End", tokens: Sequence[int], end: int | None = None) -> None:
        """What `there` has of a chain, into this pool. Raises BatonError."""
        number, written = self.places(tokens, end)
        whole = 0
        try:
            await self.receiver.fetch(there.address, written)
            whole = len(written.blocks)
        finally:
            self._release(self.pool.seal(NODE, number, whole, steady()))

    def has(self, tokens: Sequence[int]) -> list[bytes]:
        """What lies in the blocks that are found."""
        path = self.pool.memory.index.match(Chain.of(SALTLESS, tokens, LAYOUT.block_size))
        return [self._memory[block].tobytes() for block in path]

    async def at_rest(self) -> None:
        """Nothing is pinned, nothing is being written, and the books agree."""
        self.pool.check()
        await until("at rest", lambda: not any(entry.blocks for entry in self.pool.ledger(0.0).entries))

    def _release(self, found: Any) -> None:
        if found.pin is not None:
            self.pool.release(NODE, found.pin)


LIMIT = port_limit("pool", descriptor_limit())


@asynccontextmanager
async def end(folder: Path, name: str, transport: str = "zmq", blocks: int = 64, **changed: Any) -> AsyncIterator[End]:
    os.makedirs(folder, exist_ok=True)
    settings, failpoints = replace(PATIENT, transport=transport, segment_folder=folder, **changed), Failpoints()
    store = Store(folder, blocks * LAYOUT.block_bytes, LAYOUT)
    pool = Pool(Tier(blocks, LAYOUT.block_size, Lru(blocks)))
    pool.attach(NODE, 0.0)
    me = PoolIdentity(NodeName(name), f"host of {name}", store.name, DIGEST.hex(), LAYOUT)
    incarnation = Incarnation(f"incarnation of {name}")
    parts: dict[str, Any] = {
        "arena": store.view,
        "layout": LAYOUT,
        "incarnation": incarnation,
        "token": TOKEN,
        "settings": settings,
        "host_id": me.host_id,
        "failpoints": failpoints,
    }
    receiver = Receiver(
        lambda emit: build_inbound(fences=None, emit=emit, **parts), me, Channels(Dialer(TOKEN)), settings.ticket_ttl
    )
    sender = Sender(lambda emit: build_outbound(emit=emit, **parts), me, pool, steady)
    service = PeerService()
    service.sender = sender
    server, port = listening("127.0.0.1:0", TOKEN, PoolLinkServicer(), service, LIMIT)
    await server.start()
    address = PeerAddress(me.name, incarnation, me.host_id, f"127.0.0.1:{port}")
    receiver.rejoin(incarnation)
    sender.rejoin(incarnation)
    made = End(store, pool, receiver, sender, address, failpoints, server)
    try:
        yield made
        await made.at_rest()
    finally:
        await server.stop(None)
        await asyncio.gather(receiver.close(), sender.close())
        del made._memory
        store.close()
