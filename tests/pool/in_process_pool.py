"""A pool without a process: its core over a segment, and clients that answer when the test says
so."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from baton.kv.blocks import BlockHash, KVLayout
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest, RemotePrefix
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import create_segment, round_up_segment_bytes
from baton.types import BlockIndex
from kv_pool.core.blocks.attachments import PinId, PoolClientId, PoolMatch
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.evictor import LruEvictor
from kv_pool.core.index.radix_index import PromptChain


class InProcessPool:
    """The pool; `num_blocks` may be fewer than the segment has room for."""

    def __init__(self, folder: Path, layout: KVLayout, num_blocks: int = 256) -> None:
        self.folder, self.layout = folder, layout
        self.segment = create_segment(
            folder,
            "pool",
            round_up_segment_bytes(num_blocks * layout.block_bytes, layout.block_bytes),
        )
        self.block_pool = SharedBlockPool(
            CacheTier(num_blocks, layout.block_size, LruEvictor(num_blocks))
        )
        self.clients: list[FakePoolClient] = []
        self._ticks = count(1)

    def now(self) -> float:
        return float(next(self._ticks))

    def make_client(self, space: BlockAddressSpace) -> "FakePoolClient":
        client = FakePoolClient(self, space, PoolClientId(f"node {len(self.clients)}"))
        self.clients.append(client)
        return client

    def run_publications(self) -> None:
        """Carry out every publication, in order."""
        while any(port.run_publication() for port in self.clients):
            pass

    @property
    def num_pins(self) -> int:
        """The number of pins that nodes hold."""
        return sum(len(port.pins) for port in self.clients)

    def check(self) -> None:
        self.block_pool.check()

    def close(self) -> None:
        self.segment.close()


class FakePoolClient:
    """One attachment. Look-ups are answered at once unless `is_slow`; publications when
    `run_publication` is called."""

    def __init__(
        self, pool: InProcessPool, space: BlockAddressSpace, client_id: PoolClientId
    ) -> None:
        self.is_attached = True
        self.is_slow = False
        self.remote_blocks = (
            0  # blocks of what is found next that are said to come from another host's pool
        )
        self.remote_prefixes: list[RemotePrefix] = []
        self.lookups: deque[Callable[[], None]] = deque()
        self.publish_requests: deque[PublishRequest] = deque()
        self.pins: set[int] = set()
        self.copied_blocks = 0
        self._pool, self._client_id = pool, client_id
        self._memory = space.attach_segment(pool.segment.name)
        self.first_global_block = space.address_map.get_span(pool.segment.name).start
        self._blocks = np.frombuffer(space.view_range(), np.uint8).reshape(
            -1, pool.layout.block_bytes
        )
        pool.block_pool.attachments.attach_client(client_id, pool.now())

    async def run(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def find_prefix(
        self,
        root: BlockHash,
        names: bytes,
        tokens: bytes,
        max_tokens: int,
        then: Callable[[PoolHit], None],
        *,
        token_seconds: float | None = None,
        remote_prefix: RemotePrefix | None = None,
    ) -> None:
        chain = PromptChain(root, names, tokens, self._pool.layout.block_size)
        self.remote_prefixes += [remote_prefix] if remote_prefix else []

        def answer() -> None:
            hit = self._to_hit(
                self._pool.block_pool.find_prefix(
                    self._client_id, chain, max_tokens, self._pool.now()
                )
            )
            then(replace(hit, remote_blocks=self.remote_blocks))

        if self.is_slow:
            self.lookups.append(answer)
        else:
            answer()

    def release_pin(self, pin: PoolPin) -> None:
        self.pins.remove(pin.pin_number)
        self._pool.block_pool.release_pin(self._client_id, PinId(pin.pin_number))

    def publish_blocks(self, job: PublishRequest) -> bool:
        self.publish_requests.append(job)
        return True

    def run_publication(self) -> bool:
        """Carry out one publication; return False if there is none."""
        if not self.publish_requests:
            return False
        job = self.publish_requests.popleft()
        chain = PromptChain(
            job.root_hash, job.packed_hashes, job.packed_tokens, self._pool.layout.block_size
        )
        assert job.first_block + len(job.source_blocks) == len(chain)
        core, now = self._pool.block_pool, self._pool.now()
        granted = core.reserve_blocks(self._client_id, chain, job.first_block, now)
        if granted.publication_id is None:
            found = core.find_prefix(
                self._client_id, chain, len(chain) * chain.block_size, now, partial=False
            )
            if granted.first_block >= len(chain):
                job.on_done(self._to_hit(found))
            else:
                self._release_match(found)
                job.on_done(None)
            return True
        for number, place in enumerate(granted.blocks, granted.first_block):
            self._blocks[self.first_global_block + place] = self._blocks[
                job.source_blocks[number - job.first_block]
            ]
            self.copied_blocks += 1
        job.on_done(
            self._to_hit(
                core.seal_publication(
                    self._client_id, granted.publication_id, len(granted.blocks), now
                )
            )
        )
        return True

    def drop_publication(self) -> None:
        """Drop the next publication."""
        self.publish_requests.popleft().on_done(None)

    def _release_match(self, found: PoolMatch) -> None:
        if found.pin_id is not None:
            self._pool.block_pool.release_pin(self._client_id, found.pin_id)

    def _to_hit(self, found: PoolMatch) -> PoolHit:
        if found.pin_id is None:
            return PoolHit(None, ())
        self.pins.add(found.pin_id)
        blocks = tuple(BlockIndex(self.first_global_block + block) for block in found.blocks)
        partial = None
        if found.partial_block is not None:
            partial = (
                BlockIndex(self.first_global_block + found.partial_block[0]),
                found.partial_block[1],
            )
        return PoolHit(PoolPin(1, found.pin_id), blocks, partial)
