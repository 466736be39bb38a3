"""A pool without a process: the pool's core over a segment, and ports to it that answer when the test lets them."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from baton.addressing import AddressSpace
from baton.block_hash import BlockHash
from baton.kv_layout import KVLayout
from baton.pool_terms import Elsewhere, PoolHit, PoolPin, Publish
from baton.segment import create, segment_bytes
from baton.types import BlockIndex
from kv_pool.core.chain import Chain
from kv_pool.core.eviction import Lru
from kv_pool.core.holders import Found, PinId
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier


class PoolInProcess:
    """`num_blocks` may be fewer than the segment has room for."""

    def __init__(self, folder: Path, layout: KVLayout, num_blocks: int = 256) -> None:
        self.folder, self.layout = folder, layout
        self.segment = create(folder, "pool", segment_bytes(num_blocks * layout.block_bytes, layout.block_bytes))
        self.core = Pool(Tier(num_blocks, layout.block_size, Lru(num_blocks)))
        self.ports: list[Port] = []
        self._ticks = count(1)

    def now(self) -> float:
        return float(next(self._ticks))

    def port(self, space: AddressSpace) -> "Port":
        made = Port(self, space, f"node {len(self.ports)}")
        self.ports.append(made)
        return made

    def settle(self) -> None:
        """Carry every publication out, as they come."""
        while any(port.step() for port in self.ports):
            pass

    @property
    def pinned(self) -> int:
        """Pins that nodes hold."""
        return sum(len(port.pins) for port in self.ports)

    def check(self) -> None:
        self.core.check()

    def close(self) -> None:
        self.segment.close()


class Port:
    """One attachment. Look-ups are answered at once unless `slow`; publications when `step` is called."""

    def __init__(self, pool: PoolInProcess, space: AddressSpace, holder: str) -> None:
        self.attached = True
        self.slow = False
        self.remote = 0  # blocks of what is found next that are said to come from another host's pool
        self.told: list[Elsewhere] = []
        self.lookups: deque[Callable[[], None]] = deque()
        self.queue: deque[Publish] = deque()
        self.pins: set[int] = set()
        self.copied = 0
        self._pool, self._holder = pool, holder
        self._memory = space.attach(pool.segment.name)
        self.start = space.map.span(pool.segment.name).start
        self._blocks = np.frombuffer(space.view(), np.uint8).reshape(-1, pool.layout.block_bytes)
        pool.core.attach(holder, pool.now())

    async def run(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def find(
        self,
        root: BlockHash,
        names: bytes,
        tokens: bytes,
        max_tokens: int,
        then: Callable[[PoolHit], None],
        *,
        token_seconds: float | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        chain = Chain(root, names, tokens, self._pool.layout.block_size)
        self.told += [elsewhere] if elsewhere else []

        def answer() -> None:
            hit = self._hit(self._pool.core.find(self._holder, chain, max_tokens, self._pool.now()))
            then(replace(hit, remote=self.remote))

        if self.slow:
            self.lookups.append(answer)
        else:
            answer()

    def release(self, pin: PoolPin) -> None:
        self.pins.remove(pin.number)
        self._pool.core.release(self._holder, PinId(pin.number))

    def publish(self, job: Publish) -> bool:
        self.queue.append(job)
        return True

    def step(self) -> bool:
        """One publication. False if there is none."""
        if not self.queue:
            return False
        job = self.queue.popleft()
        chain = Chain(job.root, job.names, job.tokens, self._pool.layout.block_size)
        assert job.first + len(job.sources) == len(chain)
        core, now = self._pool.core, self._pool.now()
        granted = core.reserve(self._holder, chain, job.first, now)
        if granted.publication is None:
            found = core.find(self._holder, chain, len(chain) * chain.block_size, now, partial=False)
            job.then(self._hit(found) if granted.first >= len(chain) else self._nothing(found))
            return True
        for number, place in enumerate(granted.blocks, granted.first):
            self._blocks[self.start + place] = self._blocks[job.sources[number - job.first]]
            self.copied += 1
        job.then(self._hit(core.seal(self._holder, granted.publication, len(granted.blocks), now)))
        return True

    def refuse(self) -> None:
        """The next publication is dropped."""
        self.queue.popleft().then(None)

    def _nothing(self, found: Found) -> None:
        if found.pin is not None:
            self._pool.core.release(self._holder, found.pin)

    def _hit(self, found: Found) -> PoolHit:
        if found.pin is None:
            return PoolHit(None, ())
        self.pins.add(found.pin)
        blocks = tuple(BlockIndex(self.start + block) for block in found.blocks)
        partial = None
        if found.partial is not None:
            partial = BlockIndex(self.start + found.partial[0]), found.partial[1]
        return PoolHit(PoolPin(1, found.pin), blocks, partial)
