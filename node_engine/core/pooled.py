"""Blocks of the host's shared pool, as this node's sequences read them: in place, for as long as a pin holds them.

They are named by global block indices like the node's own, behind them: `BlockPool` keeps no books on them, and the
pool's process knows this node's pins. What is here counts who still reads through each pin.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.types import BlockIndex
from node_engine.core.block_pool import PartialHit
from node_engine.core.ledger import require


class PoolHold:
    """One pin and those who read through it. `release` is called once, when the last of them is done. Whoever makes it
    has the first use. Compute thread only."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._users = 1

    @property
    def users(self) -> int:
        return self._users

    def take(self) -> "PoolHold":
        """One more use."""
        require(self._users > 0, "a pin is used after its release")
        self._users += 1
        return self

    def drop(self) -> None:
        """One use less."""
        require(self._users > 0, "a pin is released twice")
        self._users -= 1
        if self._users == 0:
            self._release()


@dataclass(frozen=True, slots=True)
class Pooled:
    """What the pool has of a context: its full blocks 0, 1, ..., and the block that goes on from there. Whoever has it
    owns one use of `hold`, and ends it with `done`. The last `remote` of the blocks have come from another host's pool
    for this."""

    blocks: tuple[BlockIndex, ...]
    partial: PartialHit | None
    hold: PoolHold
    remote: int = 0

    def take(self) -> "Pooled":
        """The same for one more."""
        self.hold.take()
        return self

    def done(self) -> None:
        self.hold.drop()
