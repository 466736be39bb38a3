"""The pool under random operations, against a model that keeps whole prompts in sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kv_pool.core.chain import Chain
from kv_pool.core.cost_eviction import CostEviction
from kv_pool.core.eviction import Evictor, Lru
from kv_pool.core.holders import Holder, PublicationId
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier
from tests.unit.pool_core.prompts import ROOTS, SIZE, chain

HOLDERS = tuple(Holder(name) for name in ("a", "b", "c"))
PROMPTS = st.builds(chain, st.lists(st.sampled_from([1, 2]), max_size=6 * SIZE), st.sampled_from(ROOTS[:2]))


def content(prompt: Chain, number: int) -> tuple[bytes, bytes]:
    return prompt.root, prompt.tokens[: (number + 1) * SIZE * 4]


class PoolMachine(RuleBasedStateMachine):
    """`memory` and `file` are what the blocks would hold: a (root, tokens up to the block's end) each. Pins are those
    of live and doubtful holders; nobody else's word ends them."""

    pins = Bundle("pins")
    publications = Bundle("publications")

    @initialize(blocks=st.integers(1, 12), disk=st.integers(0, 6), cost=st.booleans())
    def start(self, blocks: int, disk: int, cost: bool) -> None:
        def evictor(total: int) -> Evictor:
            return CostEviction(total, SIZE) if cost else Lru(total)

        self.now = 0.0
        self.pool = Pool(Tier(blocks, SIZE, evictor(blocks)), Tier(disk, SIZE, evictor(disk)) if disk else None)
        self.memory: dict[int, tuple[bytes, bytes]] = {}
        self.file: dict[int, tuple[bytes, bytes]] = {}
        self.live: set[Holder] = set()
        self.doubtful: set[Holder] = set()
        self.pinned: dict[tuple[Holder, int], dict[int, tuple[bytes, bytes]]] = {}
        self.writing: dict[tuple[Holder, int], set[int]] = {}

    def obey(self) -> None:
        for move in self.pool.take_moves():
            self.file[move.disk] = self.memory[move.memory]

    def guard(self, blocks: set[int]) -> None:
        """Nobody reads or writes what is about to be written."""
        for held in self.pinned.values():
            assert not blocks & held.keys()
        for others in self.writing.values():
            assert not blocks & others

    @rule(holder=st.sampled_from(HOLDERS))
    def attach(self, holder: Holder) -> None:
        if holder not in self.live | self.doubtful:
            self.pool.attach(holder, self.now)
            self.live.add(holder)

    @rule(target=pins, holder=st.sampled_from(HOLDERS), prompt=PROMPTS, less=st.integers(0, 5), partial=st.booleans())
    def find(self, holder: Holder, prompt: Chain, less: int, partial: bool) -> object:
        if holder not in self.live:
            return multiple()
        most = max(0, len(prompt.tokens) // 4 - less)
        found = self.pool.find(holder, prompt, most, self.now, partial=partial)
        held = {block: self.memory[block] for block in found.blocks}
        assert list(held.values()) == [content(prompt, number) for number in range(len(held))]
        covered = len(held) * SIZE
        if found.partial is not None:
            block, tokens = found.partial
            covered += tokens
            held[block] = self.memory[block]
            assert partial
            assert tokens > 0
            root, prefix = self.memory[block]
            assert (root, prefix[: covered * 4]) == (prompt.root, prompt.tokens[: covered * 4])
        assert covered <= most
        if found.pin is None:
            assert not held
            return multiple()
        self.pinned[holder, found.pin] = held
        return holder, found.pin

    @rule(pin=consumes(pins))
    def release(self, pin: tuple[Holder, int]) -> None:
        if pin in self.pinned and pin[0] in self.live:
            self.pool.release(*pin)  # type: ignore[arg-type]
            del self.pinned[pin]

    @rule(target=publications, holder=st.sampled_from(HOLDERS), prompt=PROMPTS, first=st.integers(0, 3))
    def reserve(self, holder: Holder, prompt: Chain, first: int) -> object:
        if holder not in self.live:
            return multiple()
        granted = self.pool.reserve(holder, prompt, first, self.now)
        self.guard(set(granted.blocks))
        self.obey()
        if granted.publication is None:
            assert not granted.blocks
            return multiple()
        assert granted.first >= first
        self.writing[holder, granted.publication] = set(granted.blocks)
        return holder, granted.publication, prompt, granted.first, granted.blocks

    @rule(what=consumes(publications), whole=st.integers(0, 6))
    def seal(self, what: tuple[Holder, PublicationId, Chain, int, tuple[int, ...]], whole: int) -> None:
        holder, publication, prompt, first, blocks = what
        if (holder, publication) not in self.writing or holder not in self.live:
            return
        for number, block in enumerate(blocks, first):
            self.memory[block] = content(prompt, number)
        del self.writing[holder, publication]
        found = self.pool.seal(holder, publication, min(whole, len(blocks)), self.now)
        held = {block: self.memory[block] for block in found.blocks}
        assert list(held.values()) == [content(prompt, number) for number in range(len(held))]
        assert len(held) == first + min(whole, len(blocks))
        if found.pin is not None:
            self.pinned[holder, found.pin] = held

    @rule(what=consumes(publications))
    def withdraw(self, what: tuple[Holder, PublicationId, Chain, int, tuple[int, ...]]) -> None:
        if what[:2] in self.writing and what[0] in self.live:
            self.pool.withdraw(*what[:2])
            del self.writing[what[:2]]

    @rule(holder=st.sampled_from(HOLDERS))
    def stream_breaks(self, holder: Holder) -> None:
        if holder in self.live:
            self.pool.doubt(holder, self.now)
            self.live.remove(holder)
            self.doubtful.add(holder)
        assert set(self.pool.doubtful) == self.doubtful

    @rule(holder=st.sampled_from(HOLDERS))
    def proven_gone(self, holder: Holder) -> None:
        if holder in self.live | self.doubtful:
            self.pool.gone(holder)
            self.live.discard(holder)
            self.doubtful.discard(holder)
            self.pinned = {pin: held for pin, held in self.pinned.items() if pin[0] != holder}
            self.writing = {one: blocks for one, blocks in self.writing.items() if one[0] != holder}

    @rule(prompt=PROMPTS, holder=st.sampled_from(HOLDERS))
    def load_from_disk(self, prompt: Chain, holder: Holder) -> None:
        if holder not in self.live or self.pool.disk is None:
            return
        found = self.pool.find(holder, prompt, len(prompt.tokens) // 4, self.now, partial=False)
        more = self.pool.on_disk(prompt, len(found.blocks), len(prompt), self.now)
        for number, block in enumerate(more, len(found.blocks)):
            assert self.file[block] == content(prompt, number)
        if found.pin is not None:
            self.pool.release(holder, found.pin)

    @rule(seconds=st.floats(0.1, 5000))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        if self.pool.disk is not None:
            self.pool.disk.check()
        for held in self.pinned.values():
            for block, what in held.items():
                assert self.memory[block] == what
                assert block in self.pool.memory.index
        ledger = self.pool.ledger(self.now)
        assert ledger.balanced
        assert {entry.holder for entry in ledger.entries} <= self.live | self.doubtful

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for holder in self.live | self.doubtful:
                self.pool.gone(holder)
            self.pool.check()
            counts = {state.value: blocks for state, blocks in self.pool.ledger(self.now).counts.items()}
            assert counts["in_use"] == counts["quarantined"] == counts["writing"] == 0


TestPoolMachine = pytest.mark.timeout(100)(PoolMachine.TestCase)
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=40)
