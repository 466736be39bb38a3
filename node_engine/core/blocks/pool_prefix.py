"""Blocks of the host's shared pool, as this node's sequences read them: in place, for as long as a
pin holds them.

They are named by global block indices like the node's own, behind them: `BlockPool` keeps no books
on them, and the pool's process knows this node's pins. What is here counts who still reads through
each pin.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.types import BlockIndex
from node_engine.core.blocks.block_ledger import require_invariant
from node_engine.core.blocks.block_pool import PartialHit


class RefCountedPin:
    """One pin and those who read through it. `release` is called once, when the last of them is
    done. Whoever makes it has the first use. Compute thread only."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._ref_count = 1

    @property
    def ref_count(self) -> int:
        return self._ref_count

    def acquire(self) -> "RefCountedPin":
        """One more use."""
        require_invariant(self._ref_count > 0, "a pin is used after its release")
        self._ref_count += 1
        return self

    def release(self) -> None:
        """One use less."""
        require_invariant(self._ref_count > 0, "a pin is released twice")
        self._ref_count -= 1
        if self._ref_count == 0:
            self._release()


@dataclass(frozen=True, slots=True)
class PoolPrefix:
    """What the pool has of a context: its full blocks 0, 1, ..., and the block that goes on from
    there. Whoever has it owns one use of `pin`, and ends it with `release`. The last
    `num_remote_blocks` of the blocks have come from another host's pool for this."""

    blocks: tuple[BlockIndex, ...]
    partial_hit: PartialHit | None
    pin: RefCountedPin
    num_remote_blocks: int = 0

    def acquire(self) -> "PoolPrefix":
        """The same for one more."""
        self.pin.acquire()
        return self

    def release(self) -> None:
        self.pin.release()
