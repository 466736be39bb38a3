"""Replaces a node's own copies of published blocks by the shared pool's blocks in block tables.

A block is then in memory once per host.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from baton.kv.blocks import HashChain
from baton.types import BlockIndex
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.sequences.sequence import Sequence, SequenceState


class _DuplicateBlocks(NamedTuple):
    """This node's own blocks that hold logical block `logical_block` of a chain."""

    logical_block: int
    own_blocks: tuple[BlockIndex, ...]


def dedup_to_shared_pool(
    pool: BlockPool,
    sequences: Iterable[Sequence],
    chain: HashChain,
    blocks: tuple[BlockIndex, ...],
    pin: RefCountedPin,
) -> int:
    """Use the shared pool's `blocks`, full blocks 0, 1, ... of `chain`, instead of own copies.

    Called between two steps. Sequences that read own copies read the pool's blocks from now on, and
    the copies are released; a copy that a sender still reads is kept until then. WAITING sequences
    get the blocks as their pool prefix. Returns the number of copies removed from the index.
    """
    duplicates = (
        _DuplicateBlocks(
            number, tuple(pool.prefix_index.list_blocks_with_hash(chain.block_hash(number)))
        )
        for number in range(len(blocks))
    )
    copies = [copy for copy in duplicates if copy.own_blocks]
    for block in (block for copy in copies for block in copy.own_blocks):
        pool.unindex_block(block)
    for sequence in sequences:
        if sequence.state is SequenceState.WAITING:
            _set_longer_pool_prefix(pool.block_size, sequence, chain, blocks, pin)
        else:
            _swap_blocks(pool, sequence, copies, blocks, pin)
    return sum(len(copy.own_blocks) for copy in copies)


def _swap_blocks(
    pool: BlockPool,
    sequence: Sequence,
    copies: list[_DuplicateBlocks],
    blocks: SequenceOf[BlockIndex],
    pin: RefCountedPin,
) -> None:
    table, replaced = sequence.block_table, []
    for number, own in copies:
        if number < len(table) and table[number] in own:
            replaced.append(table[number])
            table[number] = blocks[number]
    if replaced:
        sequence.pool_use.num_blocks += len(replaced)
        sequence.pool_use.pins.append(pin.acquire())
        pool.release_blocks(replaced, sequence.owner)


def _set_longer_pool_prefix(
    block_size: int,
    sequence: Sequence,
    chain: HashChain,
    blocks: tuple[BlockIndex, ...],
    pin: RefCountedPin,
) -> None:
    """A WAITING sequence looked the pool up before these blocks were there."""
    max_blocks = min(len(blocks), sequence.num_reusable_tokens // block_size)
    shared = next(
        (
            number
            for number in range(max_blocks)
            if sequence.chain.block_hash(number) != chain.block_hash(number)
        ),
        max_blocks,
    )
    if shared > (len(prefix.blocks) if (prefix := sequence.pool_use.prefix) else 0):
        sequence.pool_use.set_prefix(PoolPrefix(blocks[:shared], None, pin.acquire()))
