"""What one node has published is read in the shared pool from then on, so that a block is in memory
once per host."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from baton.kv.hash_chain import HashChain
from baton.types import BlockIndex
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.sequences.sequence import Sequence, SequenceState


class _DuplicateBlocks(NamedTuple):
    """Own blocks that hold logical block `logical_block` of the chain."""

    logical_block: int
    own_blocks: tuple[BlockIndex, ...]


def dedup_to_shared_pool(
    pool: BlockPool,
    sequences: Iterable[Sequence],
    chain: HashChain,
    blocks: tuple[BlockIndex, ...],
    hold: RefCountedPin,
) -> int:
    """Between two steps: the shared pool has the full blocks 0, 1, ... of `chain` in `blocks`.
    Whoever reads own copies of them reads those of the pool from now on, and the copies go; a
    sender that still reads one keeps it that long. Who waits may start with them. Returns the
    copies given up."""
    twins = (
        _DuplicateBlocks(
            number, tuple(pool.prefix_index.list_blocks_with_hash(chain.block_hash(number)))
        )
        for number in range(len(blocks))
    )
    copies = [each for each in twins if each.own_blocks]
    for block in (block for each in copies for block in each.own_blocks):
        pool.unindex_block(block)
    for sequence in sequences:
        if sequence.state is SequenceState.WAITING:
            _set_longer_pool_prefix(pool.block_size, sequence, chain, blocks, hold)
        else:
            _swap_blocks(pool, sequence, copies, blocks, hold)
    return sum(len(each.own_blocks) for each in copies)


def _swap_blocks(
    pool: BlockPool,
    sequence: Sequence,
    copies: list[_DuplicateBlocks],
    blocks: SequenceOf[BlockIndex],
    hold: RefCountedPin,
) -> None:
    table, given_up = sequence.block_table, []
    for number, own in copies:
        if number < len(table) and table[number] in own:
            given_up.append(table[number])
            table[number] = blocks[number]
    if given_up:
        sequence.num_pool_blocks += len(given_up)
        sequence.pool_pins.append(hold.acquire())
        pool.release_blocks(given_up, sequence.owner)


def _set_longer_pool_prefix(
    block_size: int,
    sequence: Sequence,
    chain: HashChain,
    blocks: tuple[BlockIndex, ...],
    hold: RefCountedPin,
) -> None:
    """Its own look-up was too early."""
    most = min(len(blocks), sequence.num_reusable_tokens // block_size)
    shared = next(
        (
            number
            for number in range(most)
            if sequence.chain.block_hash(number) != chain.block_hash(number)
        ),
        most,
    )
    if shared > (len(sequence.pool_prefix.blocks) if sequence.pool_prefix else 0):
        sequence.set_pool_prefix(PoolPrefix(blocks[:shared], None, hold.acquire()))
