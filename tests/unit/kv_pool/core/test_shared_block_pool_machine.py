"""The pool under random operations, against a model that keeps whole prompts in sets."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kv_pool.core.blocks.attachments import PoolClientId, PublicationId
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.cost_evictor import CostEvictor
from kv_pool.core.eviction.evictor import Evictor, LruEvictor
from kv_pool.core.index.radix_index import PromptChain
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, ROOTS, make_chain

CLIENT_IDS = tuple(PoolClientId(name) for name in ("a", "b", "c"))
PROMPTS = st.builds(
    make_chain,
    st.lists(st.sampled_from([1, 2]), max_size=6 * PROMPT_BLOCK_TOKENS),
    st.sampled_from(ROOTS[:2]),
)


def content(prompt: PromptChain, number: int) -> tuple[bytes, bytes]:
    return prompt.root_hash, prompt.packed_tokens[: (number + 1) * PROMPT_BLOCK_TOKENS * 4]


class SharedBlockPoolMachine(RuleBasedStateMachine):
    """`memory` and `file` are what the blocks would hold: a (root, tokens up to the block's end)
    each. Pins are those of live and suspect clients; nobody else's word ends them."""

    pins = Bundle("pins")
    publications = Bundle("publications")

    @initialize(blocks=st.integers(1, 12), disk=st.integers(0, 6), cost=st.booleans())
    def start(self, blocks: int, disk: int, cost: bool) -> None:
        def evictor(total: int) -> Evictor:
            return CostEvictor(total, PROMPT_BLOCK_TOKENS) if cost else LruEvictor(total)

        self.now = 0.0
        self.pool = SharedBlockPool(
            CacheTier(blocks, PROMPT_BLOCK_TOKENS, evictor(blocks)),
            CacheTier(disk, PROMPT_BLOCK_TOKENS, evictor(disk)) if disk else None,
        )
        self.memory: dict[int, tuple[bytes, bytes]] = {}
        self.file: dict[int, tuple[bytes, bytes]] = {}
        self.live_clients: set[PoolClientId] = set()
        self.suspects: set[PoolClientId] = set()
        self.pinned: dict[tuple[PoolClientId, int], dict[int, tuple[bytes, bytes]]] = {}
        self.writing: dict[tuple[PoolClientId, int], set[int]] = {}

    def carry_out_demotions(self) -> None:
        for move in self.pool.take_demotions():
            self.file[move.disk_slot] = self.memory[move.memory_block]

    def assert_unused(self, blocks: set[int]) -> None:
        """Nobody reads or writes what is about to be written."""
        for held in self.pinned.values():
            assert not blocks & held.keys()
        for others in self.writing.values():
            assert not blocks & others

    @rule(client_id=st.sampled_from(CLIENT_IDS))
    def attach(self, client_id: PoolClientId) -> None:
        if client_id not in self.live_clients | self.suspects:
            self.pool.attachments.attach_client(client_id, self.now)
            self.live_clients.add(client_id)

    @rule(
        target=pins,
        client_id=st.sampled_from(CLIENT_IDS),
        prompt=PROMPTS,
        less=st.integers(0, 5),
        partial=st.booleans(),
    )
    def find(
        self, client_id: PoolClientId, prompt: PromptChain, less: int, partial: bool
    ) -> object:
        if client_id not in self.live_clients:
            return multiple()
        most = max(0, len(prompt.packed_tokens) // 4 - less)
        found = self.pool.find_prefix(client_id, prompt, most, self.now, partial=partial)
        held = {block: self.memory[block] for block in found.blocks}
        assert list(held.values()) == [content(prompt, number) for number in range(len(held))]
        covered = len(held) * PROMPT_BLOCK_TOKENS
        if found.partial_block is not None:
            block, tokens = found.partial_block
            covered += tokens
            held[block] = self.memory[block]
            assert partial
            assert tokens > 0
            root, prefix = self.memory[block]
            assert (root, prefix[: covered * 4]) == (
                prompt.root_hash,
                prompt.packed_tokens[: covered * 4],
            )
        assert covered <= most
        if found.pin_id is None:
            assert not held
            return multiple()
        self.pinned[client_id, found.pin_id] = held
        return client_id, found.pin_id

    @rule(pin=consumes(pins))
    def release(self, pin: tuple[PoolClientId, int]) -> None:
        if pin in self.pinned and pin[0] in self.live_clients:
            self.pool.release_pin(*pin)  # type: ignore[arg-type]
            del self.pinned[pin]

    @rule(
        target=publications,
        client_id=st.sampled_from(CLIENT_IDS),
        prompt=PROMPTS,
        first=st.integers(0, 3),
    )
    def reserve(self, client_id: PoolClientId, prompt: PromptChain, first: int) -> object:
        if client_id not in self.live_clients:
            return multiple()
        granted = self.pool.reserve_blocks(client_id, prompt, first, self.now)
        self.assert_unused(set(granted.blocks))
        self.carry_out_demotions()
        if granted.publication_id is None:
            assert not granted.blocks
            return multiple()
        assert granted.first_block >= first
        self.writing[client_id, granted.publication_id] = set(granted.blocks)
        return client_id, granted.publication_id, prompt, granted.first_block, granted.blocks

    @rule(reserved=consumes(publications), whole=st.integers(0, 6))
    def seal(
        self,
        reserved: tuple[PoolClientId, PublicationId, PromptChain, int, tuple[int, ...]],
        whole: int,
    ) -> None:
        client_id, publication, prompt, first, blocks = reserved
        if (client_id, publication) not in self.writing or client_id not in self.live_clients:
            return
        for number, block in enumerate(blocks, first):
            self.memory[block] = content(prompt, number)
        del self.writing[client_id, publication]
        found = self.pool.seal_publication(
            client_id, publication, min(whole, len(blocks)), self.now
        )
        held = {block: self.memory[block] for block in found.blocks}
        assert list(held.values()) == [content(prompt, number) for number in range(len(held))]
        assert len(held) == first + min(whole, len(blocks))
        if found.pin_id is not None:
            self.pinned[client_id, found.pin_id] = held

    @rule(reserved=consumes(publications))
    def withdraw(
        self,
        reserved: tuple[PoolClientId, PublicationId, PromptChain, int, tuple[int, ...]],
    ) -> None:
        if reserved[:2] in self.writing and reserved[0] in self.live_clients:
            self.pool.withdraw_publication(*reserved[:2])
            del self.writing[reserved[:2]]

    @rule(client_id=st.sampled_from(CLIENT_IDS))
    def stream_breaks(self, client_id: PoolClientId) -> None:
        if client_id in self.live_clients:
            self.pool.attachments.mark_suspect(client_id, self.now)
            self.live_clients.remove(client_id)
            self.suspects.add(client_id)
        assert set(self.pool.attachments.suspect_clients) == self.suspects

    @rule(client_id=st.sampled_from(CLIENT_IDS))
    def client_is_proven_gone(self, client_id: PoolClientId) -> None:
        if client_id in self.live_clients | self.suspects:
            self.pool.remove_client(client_id)
            self.live_clients.discard(client_id)
            self.suspects.discard(client_id)
            self.pinned = {pin: held for pin, held in self.pinned.items() if pin[0] != client_id}
            self.writing = {
                one: blocks for one, blocks in self.writing.items() if one[0] != client_id
            }

    @rule(prompt=PROMPTS, client_id=st.sampled_from(CLIENT_IDS))
    def load_from_disk(self, prompt: PromptChain, client_id: PoolClientId) -> None:
        if client_id not in self.live_clients or self.pool.disk is None:
            return
        found = self.pool.find_prefix(
            client_id, prompt, len(prompt.packed_tokens) // 4, self.now, partial=False
        )
        more = self.pool.find_on_disk(prompt, len(found.blocks), len(prompt), self.now)
        for number, block in enumerate(more, len(found.blocks)):
            assert self.file[block] == content(prompt, number)
        if found.pin_id is not None:
            self.pool.release_pin(client_id, found.pin_id)

    @rule(seconds=st.floats(0.1, 5000))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def ledger_balances(self) -> None:
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
        assert ledger.is_balanced
        assert {entry.owner for entry in ledger.entries} <= self.live_clients | self.suspects

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for client_id in self.live_clients | self.suspects:
                self.pool.remove_client(client_id)
            self.pool.check()
            counts = {
                state.value: blocks for state, blocks in self.pool.ledger(self.now).counts.items()
            }
            assert counts["in_use"] == counts["quarantined"] == counts["writing"] == 0


TestPoolMachine = pytest.mark.slow(SharedBlockPoolMachine.TestCase)
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=40)
