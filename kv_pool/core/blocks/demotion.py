"""Planning of demotions: which blocks go to disk when memory evicts a block.

The disk's index obeys the same rules as the memory's index, so that it is complete after a restart:
a block is demoted together with those before it in its prompt that are not on disk yet. They are
still in memory at that time, and were used at least as often.
"""

from dataclasses import dataclass

from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT


@dataclass(frozen=True, slots=True)
class Demotion:
    """An order to copy a block of memory to a slot of the disk's file."""

    memory_block: int
    disk_slot: int


def plan_demotions(
    memory: CacheTier, disk: CacheTier, block: int, now: float, max_blocks: int
) -> list[Demotion]:
    """Allocate slots for `block`, which memory is about to evict, and for the blocks before it.

    At most `max_blocks` are demoted, first ones first; fewer if the disk has no room. The slots are
    in the disk's index when this returns. `now` is in seconds.
    """
    if disk.index.find_block(memory.index.block_hash(block)) is not None:
        return []  # on disk already, and all blocks before it too
    chain, path = memory.index.chain(block), memory.index.paths.path(block)
    on_disk = disk.index.match_prefix(chain)
    parent = on_disk[-1] if on_disk else ROOT
    if parent != ROOT:
        disk.pin(parent)  # allocation must not evict the parent of the new blocks
    demotions: list[Demotion] = []
    slots = disk.allocate_blocks(min(max_blocks, len(chain) - len(on_disk)), now)
    previous = parent
    for number, slot in enumerate(slots, len(on_disk)):
        if not disk.insert_block(slot, chain, number, previous, now):
            break
        demotions.append(Demotion(path[number], slot))
        previous = slot
    for slot in slots[len(demotions) :]:
        disk.free_block(slot)
    if parent != ROOT:
        disk.unpin(parent)
    return demotions
