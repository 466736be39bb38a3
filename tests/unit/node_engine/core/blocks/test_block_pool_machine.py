"""The pool under random operations, against a model of who owns and what is inside."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from baton.kv.blocks import BlockHash, HashChain
from baton.process.clock import FakeClock
from baton.types import BlockIndex, TicketId
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockState, common_prefix_length

pytestmark = pytest.mark.slow

ROOT = BlockHash(b"root")
SIZE = 4


class ModelledSequence:
    """A sequence as the scheduler would run it: a chain, its table, how many blocks are sealed."""

    def __init__(self, owner: str, tokens: list[int], table: list[BlockIndex], sealed: int) -> None:
        self.owner = owner
        self.tokens = tokens
        self.chain = HashChain(ROOT, tokens, SIZE)
        self.table = table
        self.num_indexed_blocks = sealed


class BlockPoolMachine(RuleBasedStateMachine):
    holders: Bundle[ModelledSequence] = Bundle("holders")
    reserved: Bundle[TicketId] = Bundle("reserved")
    writing: Bundle[TicketId] = Bundle("writing")
    quarantined: Bundle[TicketId] = Bundle("quarantined")

    @initialize(num_blocks=st.integers(3, 12))
    def begin(self, num_blocks: int) -> None:
        self.num_backed, self.most_backed = 0, num_blocks
        self.pool = BlockPool(num_blocks, SIZE, FakeClock(), self.back_blocks)
        self.count = 0
        self.content: dict[
            BlockIndex, tuple[int, ...]
        ] = {}  # what was last sealed into a block: its whole prefix
        self.owned: dict[BlockIndex, set[str]] = {}
        self.out: dict[TicketId, tuple[BlockIndex, ...]] = {}

    def mint_name(self) -> str:
        self.count += 1
        return str(self.count)

    def back_blocks(self, count: int) -> int:
        """Memory that is allocated on demand, and by nobody else."""
        self.num_backed = max(self.num_backed, min(count, self.most_backed))
        return self.num_backed

    @rule()
    def run_out_of_memory(self) -> None:
        """No block that has no memory now will ever have any."""
        self.most_backed = self.num_backed
        self.pool.remove_unbacked_blocks()
        assert self.pool.num_blocks == self.num_backed

    def on_blocks_taken(self, blocks: tuple[BlockIndex, ...], owner: str) -> None:
        for block in blocks:
            assert block < self.num_backed, f"block {block} has no memory"
            assert not self.owned.get(block), f"block {block} was handed out twice"
            assert all(block not in promised for promised in self.out.values())
            self.owned[block] = {owner}
            self.content.pop(block, None)

    def release_sequence(self, holder: ModelledSequence) -> None:
        self.pool.release_blocks(holder.table, holder.owner)
        for block in holder.table:
            self.owned[block].remove(holder.owner)

    @rule(target=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5 * SIZE))
    def start(self, tokens: list[int]) -> ModelledSequence | MultipleResults[ModelledSequence]:
        owner, cap = self.mint_name(), len(tokens) - 1
        chain = HashChain(ROOT, tokens, SIZE)
        whole, best = self.oracle(tokens, cap)
        match = self.pool.match_prefix(chain, cap, owner)
        assert len(match.blocks) == whole
        assert (match.partial_hit.num_tokens if match.partial_hit else 0) == best
        for number, block in enumerate(match.blocks):
            assert self.content[block] == tuple(tokens[: (number + 1) * SIZE])
            self.owned[block].add(owner)
        if match.partial_hit:
            assert self.content[match.partial_hit.source_block][: match.num_tokens] == tuple(
                tokens[: match.num_tokens]
            )
            assert match.partial_hit.source_block not in match.blocks
            self.pool.release_blocks((match.partial_hit.source_block,), owner)
        needed = -(-len(tokens) // SIZE) - len(match.blocks)
        available = self.pool.num_available_blocks
        fresh = self.pool.allocate_blocks(needed, owner)
        assert (fresh is None) == (needed > available)
        if fresh is None:
            self.pool.release_blocks(match.blocks, owner)
            for block in match.blocks:
                self.owned[block].remove(owner)
            return multiple()
        self.on_blocks_taken(fresh, owner)
        return ModelledSequence(owner, tokens, [*match.blocks, *fresh], len(match.blocks))

    def oracle(self, tokens: list[int], cap: int) -> tuple[int, int]:
        """Whole blocks and tokens of one more that a match has to find, by looking at every indexed
        block."""
        there = {self.content[block] for block in self.content if block in self.pool.prefix_index}
        whole = 0
        while (whole + 1) * SIZE <= cap and tuple(tokens[: (whole + 1) * SIZE]) in there:
            whole += 1
        prefix, rest = tuple(tokens[: whole * SIZE]), tokens[whole * SIZE : cap]
        begins = [(each, (len(each) - 1) // SIZE * SIZE) for each in there]
        children = [each[begin:] for each, begin in begins if each[:begin] == prefix]
        return whole, max((common_prefix_length(child, rest) for child in children), default=0)

    @rule(holder=holders)
    def seal_next(self, holder: ModelledSequence) -> None:
        number = holder.num_indexed_blocks
        if (number + 1) * SIZE > len(holder.tokens):
            return
        self.pool.index_block(holder.table[number], holder.chain, number)
        self.content[holder.table[number]] = tuple(holder.tokens[: (number + 1) * SIZE])
        holder.num_indexed_blocks += 1

    @rule(holder=holders)
    def seal_beginning(self, holder: ModelledSequence) -> None:
        """What there is of a block that is not full yet."""
        number, length = divmod(len(holder.tokens), SIZE)
        if (
            length == 0
            or number != holder.num_indexed_blocks
            or holder.table[number] in self.pool.prefix_index
        ):
            return
        self.pool.index_block(holder.table[number], holder.chain, number, length)
        self.content[holder.table[number]] = tuple(holder.tokens)

    @rule(holder=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=SIZE))
    def generate(self, holder: ModelledSequence, tokens: list[int]) -> None:
        needed = -(-(len(holder.tokens) + len(tokens)) // SIZE) - len(holder.table)
        fresh = self.pool.allocate_blocks(needed, holder.owner)
        if fresh is not None:
            self.on_blocks_taken(fresh, holder.owner)
            holder.table.extend(fresh)
            holder.tokens.extend(tokens)

    @rule(holder=consumes(holders))
    def finish(self, holder: ModelledSequence) -> None:
        self.release_sequence(holder)

    @rule(target=reserved, count=st.integers(1, 4))
    def reserve(self, count: int) -> TicketId | MultipleResults[TicketId]:
        ticket = TicketId(self.mint_name())
        available = self.pool.num_available_blocks
        blocks = self.pool.reservations.reserve_for_ticket(count, ticket, ticket)
        assert (blocks is None) == (count > available)
        if blocks is None:
            return multiple()
        self.on_blocks_taken(blocks, ticket)
        self.out[ticket] = blocks
        return ticket

    @rule(target=writing, ticket=consumes(reserved))
    def write(self, ticket: TicketId) -> TicketId:
        self.pool.reservations.mark_writing(ticket)
        return ticket

    @rule(target=holders, ticket=consumes(writing), token=st.integers(0, 1))
    def commit(self, ticket: TicketId, token: int) -> ModelledSequence:
        blocks = self.pool.reservations.commit_ticket(ticket)
        assert blocks == self.out.pop(ticket)
        return ModelledSequence(ticket, [token] * SIZE * len(blocks), list(blocks), 0)

    @rule(target=quarantined, ticket=consumes(reserved) | consumes(writing))
    def lose(self, ticket: TicketId) -> TicketId:
        self.pool.reservations.quarantine_ticket(ticket)
        return ticket

    @rule(ticket=consumes(reserved) | consumes(writing))
    def lose_fenced(self, ticket: TicketId) -> None:
        self.pool.reservations.release_ticket(ticket)
        self.end(ticket)

    @rule(ticket=consumes(quarantined))
    def fence(self, ticket: TicketId) -> None:
        self.pool.reservations.free_quarantined_ticket(ticket)
        self.end(ticket)

    def end(self, ticket: TicketId) -> None:
        for block in self.out.pop(ticket):
            self.owned[block].remove(ticket)

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        ledger = self.pool.take_ledger()
        assert ledger.is_balanced
        for block, owners in self.owned.items():
            if not any(block in promised for promised in self.out.values()):
                assert self.pool.ownership.get_ref_count(block) == len(owners)
        for state in (BlockState.RESERVED, BlockState.WRITING, BlockState.QUARANTINED):
            assert sum(
                each.num_blocks for each in ledger.entries if each.state is state
            ) == self.pool.ownership.count_blocks(state)

    @invariant()
    def nobody_is_stranded(self) -> None:
        if hasattr(self, "pool"):
            for number in range(self.pool.num_blocks):
                if self.pool.ownership.get_block_state(BlockIndex(number)) is BlockState.CACHED:
                    parent = self.pool.prefix_index.get_entry(BlockIndex(number)).parent_hash
                    assert parent == ROOT or self.pool.prefix_index.list_blocks_with_hash(parent)


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlockPoolMachine = BlockPoolMachine.TestCase
