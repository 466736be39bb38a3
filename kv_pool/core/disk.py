"""What goes to disk when memory evicts it, and when it is worth reading back.

The disk's index has the rules of the memory's, so it is whole by itself after a restart: with a block go those before
it that are not there yet. They are still in memory then, and were used at least as often.
"""

from dataclasses import dataclass

from kv_pool.core.radix_index import ROOT
from kv_pool.core.tier import Tier


@dataclass(frozen=True, slots=True)
class Move:
    """Copy block `memory` of the segment to block `disk` of the file."""

    memory: int
    disk: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured. Seconds, bytes per second; `token_seconds` is what a prefill node takes for one token without context,
    and `quadratic` the context, in tokens, at which it takes twice as long."""

    load_latency: float
    load_bytes: float
    token_seconds: float
    quadratic: float

    def recompute_seconds(self, first: int, tokens: int) -> float:
        """Of tokens `first` ... of a prompt."""
        return self.token_seconds * tokens * (1 + (first + tokens / 2) / self.quadratic)

    def load_seconds(self, size: int) -> float:
        return self.load_latency + size / self.load_bytes


def worth_loading(first: int, tokens: int, size: int, rates: Rates) -> bool:
    """Whether reading `size` bytes takes less than computing `tokens` tokens after `first`. Loading costs the same for
    every block and computing more for each later one, so it is all of them or none."""
    return rates.load_seconds(size) < rates.recompute_seconds(first, tokens)


def demote(memory: Tier, disk: Tier, block: int, now: float) -> list[Move]:
    """Give `block`, which memory is about to evict, and what precedes it places on disk; as many as there are, first
    ones first."""
    chain, path = memory.index.chain(block), memory.index.path(block)
    there = disk.index.match(chain)
    parent = there[-1] if there else ROOT
    if parent != ROOT:
        disk.pin(parent)  # before room is made for its children
    moves: list[Move] = []
    places = disk.take(len(chain) - len(there), now)
    below = parent
    for number, place in enumerate(places, len(there)):
        if not disk.insert(place, chain, number, below, now):
            break
        moves.append(Move(path[number], place))
        below = place
    for place in places[len(moves) :]:
        disk.give_back(place)
    if parent != ROOT:
        disk.unpin(parent)
    return moves
