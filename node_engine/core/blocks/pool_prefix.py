"""Blocks of the host's shared pool that sequences of this node read in place, under a pin.

Their global block indices follow those of the node's own arena. `BlockPool` does not track them:
the pool process knows the pins of this node, and this module counts the readers of each pin.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.types import BlockIndex
from node_engine.core.blocks.block_pool import PartialHit
from node_engine.core.blocks.block_records import require_invariant


class RefCountedPin:
    """One pin of the shared pool and the number of its readers. Compute thread only.

    The creator holds the first reference. `release` is called once, after the last reader.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._ref_count = 1

    @property
    def ref_count(self) -> int:
        return self._ref_count

    def acquire(self) -> "RefCountedPin":
        """Add a reader; returns this pin."""
        require_invariant(self._ref_count > 0, "a pool pin is used after its release")
        self._ref_count += 1
        return self

    def release(self) -> None:
        """Remove a reader; the last one releases the pin in the pool."""
        require_invariant(self._ref_count > 0, "a pool pin is released twice")
        self._ref_count -= 1
        if self._ref_count == 0:
            self._release()


@dataclass(frozen=True, slots=True)
class PoolPrefix:
    """The prefix of a context that the host's shared pool has.

    The holder owns one reference on `pin` and gives it up with `release`.
    """

    blocks: tuple[BlockIndex, ...]  # full blocks 0, 1, ... of the context
    partial_hit: PartialHit | None  # the block that continues them
    pin: RefCountedPin
    num_remote_blocks: int = 0  # the last so many of `blocks` came from another host's pool

    def acquire(self) -> "PoolPrefix":
        """Add a reference on the pin for one more holder; returns this prefix."""
        self.pin.acquire()
        return self

    def release(self) -> None:
        self.pin.release()
