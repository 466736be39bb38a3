"""What goes to disk when memory evicts it.

The disk's index has the rules of the memory's, so it is whole by itself after a restart: with a
block go those before it that are not there yet. They are still in memory then, and were used at
least as often.
"""

from dataclasses import dataclass

from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT


@dataclass(frozen=True, slots=True)
class Demotion:
    """Copy block `memory_block` of the segment to block `disk_slot` of the file."""

    memory_block: int
    disk_slot: int


def plan_demotions(
    memory: CacheTier, disk: CacheTier, block: int, now: float, most: int
) -> list[Demotion]:
    """Give `block`, which memory is about to evict, and what precedes it places on disk; as many as
    there are, at most `most`, first ones first."""
    if disk.index.find_block(memory.index.block_hash(block)) is not None:
        return []  # with all before it
    chain, path = memory.index.chain(block), memory.index.path(block)
    there = disk.index.match_prefix(chain)
    parent = there[-1] if there else ROOT
    if parent != ROOT:
        disk.pin(parent)  # before room is made for its children
    moves: list[Demotion] = []
    places = disk.allocate_blocks(min(most, len(chain) - len(there)), now)
    below = parent
    for number, place in enumerate(places, len(there)):
        if not disk.insert_block(place, chain, number, below, now):
            break
        moves.append(Demotion(path[number], place))
        below = place
    for place in places[len(moves) :]:
        disk.free_block(place)
    if parent != ROOT:
        disk.unpin(parent)
    return moves
