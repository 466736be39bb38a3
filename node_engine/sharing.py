"""A node's use of its host's shared pool, as its compute thread sees it.

    a look-up's answer comes with the order -> `pooled`: what the scheduler may start a sequence with
    a prompt is computed, a block fills     -> `publish`: the pool's client copies, some time, on a thread of its own
    Published                               -> `published`: own copies make way for the pool's blocks, between two steps

Nothing here waits for the pool, and without one nothing happens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from baton.pool_terms import PoolHit, PoolPin, Publish
from baton.types import BlockIndex
from node_engine.core.block_pool import BlockPool, PartialHit
from node_engine.core.copy_worth import CopyWorth
from node_engine.core.pooled import Pooled, PoolHold
from node_engine.core.scheduler import Scheduler
from node_engine.core.sequence import Sequence, SequenceState
from node_engine.pool_port import PoolPort


@dataclass(frozen=True, slots=True)
class Published:
    """A publication of `sequence` has ended: `hit`, pinned, is what the pool has of its tokens, None if it failed."""

    sequence: Sequence
    label: str
    sources: tuple[BlockIndex, ...]
    holds: tuple[PoolHold, ...]  # what precedes the sources stays in the pool
    paced: bool
    hit: PoolHit | None


class Sharing:
    """`emit` puts a Published on the compute thread's inbox. `in_place`: the engine reads the pool's blocks where they
    are; otherwise they are copied, and nothing is re-pointed. Called on the compute thread only, but for `epoch` and
    `counters`."""

    def __init__(
        self,
        port: PoolPort | None,
        pool: BlockPool,
        scheduler: Scheduler,
        emit: Callable[[object], None],
        *,
        in_place: bool = True,
        copy_seconds: float = 0.0,
    ) -> None:
        self._port = port
        self._pool = pool
        self._scheduler = scheduler
        self._emit = emit
        self._in_place = in_place
        self.worth = CopyWorth(copy_seconds)
        self._numbers = count(1)
        self._repointed = 0
        self.epoch = 0  # of the event loop's: how many publications have been put on the inbox

    def counters(self) -> dict[str, float]:
        return {"baton_pool_repointed_blocks_total": float(self._repointed)} if self._port else {}

    def pooled(self, hit: PoolHit | None) -> Pooled | None:
        """What an order may start with. Whoever gets it owns its pin."""
        if hit is None or hit.pin is None:
            return None
        partial = PartialHit(*hit.partial) if hit.partial and self.worth.pays(hit.partial[1]) else None
        return Pooled(hit.blocks, partial, self._hold(hit.pin), hit.remote)

    def publish(self, sequence: Sequence, *, paced: bool = False) -> None:
        """Give the pool the full blocks that this node has computed or received for `sequence`, which may have ended.
        One publication of a sequence is under way at a time; what fills meanwhile follows it."""
        if self._port is None or not self._port.attached or sequence.publishing:
            return
        end = sequence.num_shared = sequence.num_sealed
        sources = self._pool.own_run(sequence.chain, end)
        if not sources:
            return
        label = f"publication {next(self._numbers)}"
        names, tokens = sequence.chain.joined(end)

        def then(hit: PoolHit | None) -> None:
            self.epoch += 1
            self._emit(Published(sequence, label, sources, holds, paced, hit))

        holds = tuple(hold.take() for hold in sequence.holds)
        self._pool.share(sources, label)
        sequence.publishing = True
        first = end - len(sources)
        if not self._port.publish(Publish(sequence.chain.root, names, tokens, first, sources, then, paced)):
            self._end(Published(sequence, label, sources, holds, paced, None))

    def filled(self, sequence: Sequence) -> None:
        """Decode: publish if a block has filled here since the last time, or the sequence has ended."""
        known = sequence.num_shared
        if sequence.state is not SequenceState.FINISHED:  # the context is published by whoever computed it
            known = max(known, sequence.context_len // self._pool.block_size)
        if sequence.num_sealed > known:
            self.publish(sequence, paced=True)

    def published(self, done: Published) -> None:
        """Between two steps."""
        hit = done.hit
        if hit is not None and hit.pin is not None:
            hold = self._hold(hit.pin)
            if self._in_place:
                self._repointed += self._scheduler.repoint(done.sequence.chain, hit.blocks, hold)
            hold.drop()
        self._end(done)
        if hit is not None and done.paced:
            self.filled(done.sequence)

    def _end(self, done: Published) -> None:
        done.sequence.publishing = False
        self._pool.release(done.sources, done.label)
        for hold in done.holds:
            hold.drop()

    def _hold(self, pin: PoolPin) -> PoolHold:
        port = self._port
        assert port is not None, "a pin without a pool"
        return PoolHold(lambda: port.release(pin))
