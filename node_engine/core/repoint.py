"""What one node has published is read in the shared pool from then on, so that a block is in memory once per host."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from baton.hash_chain import HashChain
from baton.types import BlockIndex
from node_engine.core.block_pool import BlockPool
from node_engine.core.pooled import Pooled, PoolHold
from node_engine.core.sequence import Sequence, SequenceState


class _Copies(NamedTuple):
    """Own blocks that hold logical block `number` of the chain."""

    number: int
    own: tuple[BlockIndex, ...]


def repoint(
    pool: BlockPool,
    sequences: Iterable[Sequence],
    chain: HashChain,
    blocks: tuple[BlockIndex, ...],
    hold: PoolHold,
) -> int:
    """Between two steps: the shared pool has the full blocks 0, 1, ... of `chain` in `blocks`. Whoever reads own copies
    of them reads those of the pool from now on, and the copies go; a sender that still reads one keeps it that long.
    Who waits may start with them. Returns the copies given up."""
    twins = (_Copies(number, tuple(pool.index.twins(chain.name(number)))) for number in range(len(blocks)))
    copies = [each for each in twins if each.own]
    for block in (block for each in copies for block in each.own):
        pool.forget(block)
    for sequence in sequences:
        if sequence.state is SequenceState.WAITING:
            _offer_beginning(pool.block_size, sequence, chain, blocks, hold)
        else:
            _swap(pool, sequence, copies, blocks, hold)
    return sum(len(each.own) for each in copies)


def _swap(
    pool: BlockPool, sequence: Sequence, copies: list[_Copies], blocks: SequenceOf[BlockIndex], hold: PoolHold
) -> None:
    table, given_up = sequence.block_table, []
    for number, own in copies:
        if number < len(table) and table[number] in own:
            given_up.append(table[number])
            table[number] = blocks[number]
    if given_up:
        sequence.num_borrowed += len(given_up)
        sequence.holds.append(hold.take())
        pool.release(given_up, sequence.owner)


def _offer_beginning(
    block_size: int, sequence: Sequence, chain: HashChain, blocks: tuple[BlockIndex, ...], hold: PoolHold
) -> None:
    """Its own look-up was too early."""
    most = min(len(blocks), sequence.reusable_tokens // block_size)
    shared = next((number for number in range(most) if sequence.chain.name(number) != chain.name(number)), most)
    if shared > (len(sequence.pooled.blocks) if sequence.pooled else 0):
        sequence.offer(Pooled(blocks[:shared], None, hold.take()))
