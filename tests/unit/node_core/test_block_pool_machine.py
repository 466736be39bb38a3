"""The pool under random operations, against a model of who owns and what is inside."""

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

from baton.block_hash import BlockHash
from baton.clock import FakeClock
from baton.hash_chain import HashChain
from baton.types import BlockIndex, TicketId
from node_engine.core.block_pool import BlockPool
from node_engine.core.ledger import BlockState
from node_engine.core.prefix_index import common_beginning

ROOT = BlockHash(b"root")
SIZE = 4


class Holder:
    """A sequence as the scheduler would run it: a chain, its table, how many blocks are sealed."""

    def __init__(self, owner: str, tokens: list[int], table: list[BlockIndex], sealed: int) -> None:
        self.owner = owner
        self.tokens = tokens
        self.chain = HashChain(ROOT, tokens, SIZE)
        self.table = table
        self.sealed = sealed


class PoolMachine(RuleBasedStateMachine):
    holders: Bundle[Holder] = Bundle("holders")
    reserved: Bundle[TicketId] = Bundle("reserved")
    writing: Bundle[TicketId] = Bundle("writing")
    quarantined: Bundle[TicketId] = Bundle("quarantined")

    @initialize(num_blocks=st.integers(3, 12))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE, FakeClock())
        self.count = 0
        self.content: dict[BlockIndex, tuple[int, ...]] = {}  # what was last sealed into a block: its whole prefix
        self.owned: dict[BlockIndex, set[str]] = {}
        self.out: dict[TicketId, tuple[BlockIndex, ...]] = {}

    def name(self) -> str:
        self.count += 1
        return str(self.count)

    def take(self, blocks: tuple[BlockIndex, ...], owner: str) -> None:
        for block in blocks:
            assert not self.owned.get(block), f"block {block} was handed out twice"
            assert all(block not in promised for promised in self.out.values())
            self.owned[block] = {owner}
            self.content.pop(block, None)

    def let_go(self, holder: Holder) -> None:
        self.pool.release(holder.table, holder.owner)
        for block in holder.table:
            self.owned[block].remove(holder.owner)

    @rule(target=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5 * SIZE))
    def start(self, tokens: list[int]) -> Holder | MultipleResults[Holder]:
        owner, cap = self.name(), len(tokens) - 1
        chain = HashChain(ROOT, tokens, SIZE)
        whole, best = self.oracle(tokens, cap)
        match = self.pool.match_prefix(chain, cap, owner)
        assert len(match.blocks) == whole
        assert (match.partial.num_tokens if match.partial else 0) == best
        for number, block in enumerate(match.blocks):
            assert self.content[block] == tuple(tokens[: (number + 1) * SIZE])
            self.owned[block].add(owner)
        if match.partial:
            assert self.content[match.partial.source][: match.num_tokens] == tuple(tokens[: match.num_tokens])
            assert match.partial.source not in match.blocks
            self.pool.release((match.partial.source,), owner)
        needed = -(-len(tokens) // SIZE) - len(match.blocks)
        available = self.pool.available
        fresh = self.pool.allocate(needed, owner)
        assert (fresh is None) == (needed > available)
        if fresh is None:
            self.pool.release(match.blocks, owner)
            for block in match.blocks:
                self.owned[block].remove(owner)
            return multiple()
        self.take(fresh, owner)
        return Holder(owner, tokens, [*match.blocks, *fresh], len(match.blocks))

    def oracle(self, tokens: list[int], cap: int) -> tuple[int, int]:
        """Whole blocks and tokens of one more that a match has to find, by looking at every indexed block."""
        there = {self.content[block] for block in self.content if block in self.pool.index}
        whole = 0
        while (whole + 1) * SIZE <= cap and tuple(tokens[: (whole + 1) * SIZE]) in there:
            whole += 1
        prefix, rest = tuple(tokens[: whole * SIZE]), tokens[whole * SIZE : cap]
        begins = [(each, (len(each) - 1) // SIZE * SIZE) for each in there]
        children = [each[begin:] for each, begin in begins if each[:begin] == prefix]
        return whole, max((common_beginning(child, rest) for child in children), default=0)

    @rule(holder=holders)
    def seal_next(self, holder: Holder) -> None:
        number = holder.sealed
        if (number + 1) * SIZE > len(holder.tokens):
            return
        self.pool.seal_block(holder.table[number], holder.chain, number)
        self.content[holder.table[number]] = tuple(holder.tokens[: (number + 1) * SIZE])
        holder.sealed += 1

    @rule(holder=holders)
    def seal_beginning(self, holder: Holder) -> None:
        """What there is of a block that is not full yet."""
        number, length = divmod(len(holder.tokens), SIZE)
        if length == 0 or number != holder.sealed or holder.table[number] in self.pool.index:
            return
        self.pool.seal_block(holder.table[number], holder.chain, number, length)
        self.content[holder.table[number]] = tuple(holder.tokens)

    @rule(holder=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=SIZE))
    def generate(self, holder: Holder, tokens: list[int]) -> None:
        needed = -(-(len(holder.tokens) + len(tokens)) // SIZE) - len(holder.table)
        fresh = self.pool.allocate(needed, holder.owner)
        if fresh is not None:
            self.take(fresh, holder.owner)
            holder.table.extend(fresh)
            holder.tokens.extend(tokens)

    @rule(holder=consumes(holders))
    def finish(self, holder: Holder) -> None:
        self.let_go(holder)

    @rule(target=reserved, count=st.integers(1, 4))
    def reserve(self, count: int) -> TicketId | MultipleResults[TicketId]:
        ticket = TicketId(self.name())
        available = self.pool.available
        blocks = self.pool.reserve(count, ticket, ticket)
        assert (blocks is None) == (count > available)
        if blocks is None:
            return multiple()
        self.take(blocks, ticket)
        self.out[ticket] = blocks
        return ticket

    @rule(target=writing, ticket=consumes(reserved))
    def write(self, ticket: TicketId) -> TicketId:
        self.pool.mark_writing(ticket)
        return ticket

    @rule(target=holders, ticket=consumes(writing), token=st.integers(0, 1))
    def commit(self, ticket: TicketId, token: int) -> Holder:
        blocks = self.pool.commit(ticket)
        assert blocks == self.out.pop(ticket)
        return Holder(ticket, [token] * SIZE * len(blocks), list(blocks), 0)

    @rule(target=quarantined, ticket=consumes(reserved) | consumes(writing))
    def lose(self, ticket: TicketId) -> TicketId:
        self.pool.quarantine(ticket)
        return ticket

    @rule(ticket=consumes(reserved) | consumes(writing))
    def lose_fenced(self, ticket: TicketId) -> None:
        self.pool.release_ticket(ticket)
        self.end(ticket)

    @rule(ticket=consumes(quarantined))
    def fence(self, ticket: TicketId) -> None:
        self.pool.fenced(ticket)
        self.end(ticket)

    def end(self, ticket: TicketId) -> None:
        for block in self.out.pop(ticket):
            self.owned[block].remove(ticket)

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        ledger = self.pool.ledger()
        assert ledger.balanced
        for block, owners in self.owned.items():
            if not any(block in promised for promised in self.out.values()):
                assert self.pool.refs(block) == len(owners)
        for state in (BlockState.RESERVED, BlockState.WRITING, BlockState.QUARANTINED):
            assert sum(each.blocks for each in ledger.entries if each.state is state) == self.pool.count(state)

    @invariant()
    def nobody_is_stranded(self) -> None:
        if hasattr(self, "pool"):
            for number in range(self.pool.total):
                if self.pool.state(BlockIndex(number)) is BlockState.CACHED:
                    parent = self.pool.index.entry(BlockIndex(number)).parent
                    assert parent == ROOT or self.pool.index.twins(parent)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
