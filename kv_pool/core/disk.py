"""What goes to disk when memory evicts it.

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


def demote(memory: Tier, disk: Tier, block: int, now: float, most: int) -> list[Move]:
    """Give `block`, which memory is about to evict, and what precedes it places on disk; as many as there are, at most
    `most`, first ones first."""
    if disk.index.find(memory.index.name(block)) is not None:
        return []  # with all before it
    chain, path = memory.index.chain(block), memory.index.path(block)
    there = disk.index.match(chain)
    parent = there[-1] if there else ROOT
    if parent != ROOT:
        disk.pin(parent)  # before room is made for its children
    moves: list[Move] = []
    places = disk.take(min(most, len(chain) - len(there)), now)
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
