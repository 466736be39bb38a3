"""Two pools' ends of the transfer plane in one process, over a real connection."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from baton.network.connection_limits import compute_port_limit
from baton.pb.pool_pb2_grpc import PoolLinkServicer
from baton.process.clock import monotonic_clock
from baton.process.descriptors import get_descriptor_limit
from baton.process.failpoints import Failpoints
from baton.types import Incarnation, NodeName, PeerAddress
from kv_pool.common.grpc_link import PeerChannels, PoolDialer, make_server
from kv_pool.common.protocol import PoolIdentity
from kv_pool.core.blocks.attachments import PoolClientId, Publication, PublicationId
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.evictor import LruEvictor
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.memory.segment_store import SegmentStore
from kv_pool.peers.peer_service import PoolPeerService
from kv_pool.peers.promotion_receiver import PromotionReceiver
from kv_pool.peers.promotion_sender import PromotionSender
from kv_transfer.common.settings import TransferSettings
from kv_transfer.factory import build_kv_receiver, build_kv_sender
from tests.pool.harness import (
    CLUSTER_TOKEN,
    DIGEST,
    LAYOUT,
    UNSALTED_ROOT,
    make_block_content,
    wait_until,
)

PATIENT_TRANSFER_SETTINGS = TransferSettings(
    ticket_ttl=60.0, progress_timeout=60.0, close_timeout=0.2
)
NODE_CLIENT_ID = PoolClientId("a node")


@dataclass
class PoolEndpoint:
    """One pool: core, segment, both planes, and the port where the other one asks. `failpoints` are
    its planes' own."""

    store: SegmentStore
    pool: SharedBlockPool
    receiver: PromotionReceiver
    sender: PromotionSender
    address: PeerAddress
    failpoints: Failpoints
    server: Any
    _memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self._memory = np.frombuffer(self.store.view, dtype=np.uint8)[
            : len(self.store.rows) * LAYOUT.block_bytes
        ]
        self._memory = self._memory.reshape(-1, LAYOUT.block_bytes)

    def publish_tokens(self, tokens: Sequence[int], root: Any = UNSALTED_ROOT) -> None:
        """Publish blocks as a node would, with the content that follows from the tokens."""
        chain = PromptChain.from_tokens(root, tokens, LAYOUT.block_size)
        granted = self.pool.reserve_blocks(NODE_CLIENT_ID, chain, 0, monotonic_clock())
        assert granted.publication_id is not None
        for number, block in enumerate(granted.blocks, granted.first_block):
            self._memory[block] = make_block_content(tokens[: (number + 1) * LAYOUT.block_size])
        self._release_match(
            self.pool.seal_publication(
                NODE_CLIENT_ID, granted.publication_id, len(granted.blocks), monotonic_clock()
            )
        )

    def reserve_publication(
        self, tokens: Sequence[int], end: int | None = None
    ) -> tuple[PublicationId, Publication]:
        chain = PromptChain.from_tokens(UNSALTED_ROOT, tokens, LAYOUT.block_size)
        path = self.pool.memory.index.match_prefix(chain)
        granted = self.pool.reserve_blocks(
            NODE_CLIENT_ID, chain, len(path), monotonic_clock(), end=end
        )
        assert granted.publication_id is not None
        return granted.publication_id, self.pool.get_publication(
            NODE_CLIENT_ID, granted.publication_id
        )

    async def fetch_from(
        self, there: "PoolEndpoint", tokens: Sequence[int], end: int | None = None
    ) -> None:
        """Fetch what `there` has of a chain into this pool. Raises BatonError."""
        number, written = self.reserve_publication(tokens, end)
        whole = 0
        try:
            await self.receiver.fetch_blocks(there.address, written)
            whole = len(written.blocks)
        finally:
            self._release_match(
                self.pool.seal_publication(NODE_CLIENT_ID, number, whole, monotonic_clock())
            )

    def read_blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the content of the blocks that are found."""
        path = self.pool.memory.index.match_prefix(
            PromptChain.from_tokens(UNSALTED_ROOT, tokens, LAYOUT.block_size)
        )
        return [self._memory[block].tobytes() for block in path]

    async def wait_until_idle(self) -> None:
        """Wait until nothing is pinned or being written, and check that the ledgers agree."""
        self.pool.check()
        await wait_until(
            "at rest", lambda: not any(entry.num_blocks for entry in self.pool.ledger(0.0).entries)
        )

    def _release_match(self, found: Any) -> None:
        if found.pin_id is not None:
            self.pool.release_pin(NODE_CLIENT_ID, found.pin_id)


LIMIT = compute_port_limit("pool", get_descriptor_limit())


@asynccontextmanager
async def pool_endpoint(
    folder: Path, name: str, transport: str = "zmq", blocks: int = 64, **changed: Any
) -> AsyncIterator[PoolEndpoint]:
    os.makedirs(folder, exist_ok=True)
    settings, failpoints = (
        replace(PATIENT_TRANSFER_SETTINGS, transport=transport, segment_folder=folder, **changed),
        Failpoints(),
    )
    store = SegmentStore(folder, blocks * LAYOUT.block_bytes, LAYOUT)
    pool = SharedBlockPool(CacheTier(blocks, LAYOUT.block_size, LruEvictor(blocks)))
    pool.attachments.attach_client(NODE_CLIENT_ID, 0.0)
    me = PoolIdentity(NodeName(name), f"host of {name}", store.name, DIGEST.hex(), LAYOUT)
    incarnation = Incarnation(f"incarnation of {name}")
    parts: dict[str, Any] = {
        "arena": store.view,
        "layout": LAYOUT,
        "incarnation": incarnation,
        "token": CLUSTER_TOKEN,
        "settings": settings,
        "host_id": me.host_id,
        "failpoints": failpoints,
    }
    receiver = PromotionReceiver(
        lambda emit: build_kv_receiver(fences=None, emit=emit, **parts),
        me,
        PeerChannels(PoolDialer(CLUSTER_TOKEN)),
        settings.ticket_ttl,
    )
    sender = PromotionSender(
        lambda emit: build_kv_sender(emit=emit, **parts), me, pool, monotonic_clock
    )
    service = PoolPeerService()
    service.sender = sender
    server, port = make_server("127.0.0.1:0", CLUSTER_TOKEN, PoolLinkServicer(), service, LIMIT)
    await server.start()
    address = PeerAddress(me.name, incarnation, me.host_id, f"127.0.0.1:{port}")
    receiver.rejoin(incarnation)
    sender.rejoin(incarnation)
    endpoint = PoolEndpoint(store, pool, receiver, sender, address, failpoints, server)
    try:
        yield endpoint
        await endpoint.wait_until_idle()
    finally:
        await server.stop(None)
        await asyncio.gather(receiver.close(), sender.close())
        del endpoint._memory
        store.close()
