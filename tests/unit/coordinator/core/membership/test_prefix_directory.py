"""The directory against a model: whatever is lost, late or repeated, it never has more than the
node last said, and a snapshot makes it right again."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.cluster_link.messages import CacheSnapshot
from baton.kv.blocks import BlockHash, short_hash
from baton.kv.cache_journal import MAX_HASHES_PER_BATCH, CacheEventBatch, CacheJournal
from baton.types import Incarnation
from coordinator.core.membership.prefix_directory import (
    SNAPSHOT_TIMEOUT_SECONDS,
    SWEEP_SLICE,
    PrefixDirectory,
)
from tests.unit.coordinator.core.brain_harness import DECODE, BrainHarness

A, B, C = (Incarnation(name) for name in "abc")
NODES = (A, B, C)
NAMES = st.integers(0, 11)


def directory(**held: Sequence[int]) -> PrefixDirectory:
    found = PrefixDirectory()
    for node, names in held.items():
        found.add_node(Incarnation(node), 100)
        found.apply_snapshot(Incarnation(node), 1, names)
    return found


def test_match_returns_cached_blocks_of_each_node() -> None:
    found = directory(a=[1, 2, 3], b=[1, 3], c=[2, 3])
    assert found.match_prefix([1, 2, 3, 4]) == {A: 3, B: 1}
    assert found.match_prefix([9, 1]) == {}
    assert found.match_prefix([]) == {}
    assert len(found) == 3


def test_hashes_are_computed_only_as_far_as_they_match() -> None:
    read: list[int] = []

    def names() -> Iterator[int]:
        for name in (1, 2, 3, 4):
            read.append(name)
            yield name

    assert directory(a=[1]).match_prefix(names()) == {A: 1}
    assert read == [1, 2]


def test_leaving_node_frees_its_blocks_and_slot() -> None:
    found = directory(a=[1, 2], b=[1])
    found.remove_node(A)
    found.remove_node(A)
    assert found.match_prefix([1, 2]) == {B: 1}
    found.add_node(C, 100)
    assert found.match_prefix([1, 2]) == {B: 1}
    found.apply_snapshot(C, 1, [1, 2])
    assert found.match_prefix([1, 2]) == {B: 1, C: 2}
    assert len(found) == 2


def test_event_gap_requests_snapshot_and_keeps_known_blocks() -> None:
    found = directory(a=[1])
    assert not found.apply_events(A, 2, [2], [], 0.0)
    assert found.apply_events(A, 4, [4], [1], 0.0)  # 3 is missing
    assert not found.apply_events(A, 5, [5], [], SNAPSHOT_TIMEOUT_SECONDS / 2)
    assert found.match_prefix([1, 2]) == {A: 2}
    assert found.apply_events(
        A, 6, [6], [], SNAPSHOT_TIMEOUT_SECONDS
    )  # the question or its answer was lost
    assert found.resync_count == 2
    found.apply_snapshot(A, 7, [4, 5, 6])
    assert not found.apply_events(A, 8, [7], [], SNAPSHOT_TIMEOUT_SECONDS)
    assert found.get_block_hashes(A) == {4, 5, 6, 7}


def test_events_before_first_snapshot_are_ignored() -> None:
    found = PrefixDirectory()
    found.add_node(A, 100)
    assert found.apply_events(A, 1, [1], [], 0.0)
    assert found.match_prefix([1]) == {}


def test_repeated_and_late_messages_change_nothing() -> None:
    found = directory(a=[1])
    assert not found.apply_events(A, 2, [], [1], 0.0)
    assert not found.apply_events(A, 2, [1], [], 0.0)
    found.apply_snapshot(A, 1, [1])
    assert found.get_block_hashes(A) == frozenset()


def test_entries_are_bounded_by_node_capacity() -> None:
    found = PrefixDirectory()
    found.add_node(A, 2)
    found.apply_snapshot(A, 1, [1, 2, 3])
    found.apply_events(A, 2, [4], [1], 0.0)
    assert found.get_block_hashes(A) == {2, 4}


class PrefixDirectoryMachine(RuleBasedStateMachine):
    """Nodes with real journals, whose messages are delivered, lost, or held back and delivered
    late."""

    @initialize()
    def initialize_nodes(self) -> None:
        self.directory, self.now = PrefixDirectory(), 0.0
        self.caches: dict[Incarnation, set[int]] = {node: set() for node in NODES}
        self.journals = {node: CacheJournal() for node in NODES}
        self.expected_blocks = {
            node: set[int]() for node in NODES
        }  # what the directory must have of nodes in step
        self.is_synced = dict.fromkeys(NODES, False)
        self.late_messages: list[tuple[Incarnation, CacheEventBatch]] = []
        for node in NODES:
            self.directory.add_node(node, 12)
            self.send_snapshot(node)

    def send_snapshot(self, node: Incarnation) -> None:
        names = [_block_hash(number) for number in sorted(self.caches[node])]
        for change in self.journals[node].build_snapshot(names, self.now):
            self.directory.apply_snapshot(node, change.sequence_number, change.inserted_hashes)
        self.is_synced[node], self.expected_blocks[node] = True, set(self.caches[node])

    @rule(node=st.sampled_from(NODES), number=NAMES)
    def toggle_block(self, node: Incarnation, number: int) -> None:
        cache, journal = self.caches[node], self.journals[node]
        (journal.record_eviction if number in cache else journal.record_insertion)(
            _block_hash(number)
        )
        cache ^= {number}

    @rule(node=st.sampled_from(NODES), fate=st.sampled_from(["arrives", "twice", "lost", "late"]))
    def send_events(self, node: Incarnation, fate: str) -> None:
        for change in self.journals[node].pop_events(self.now):
            if fate in ("lost", "late"):
                self.is_synced[node] = False
                self.late_messages += [(node, change)] if fate == "late" else []
                continue
            for _ in range(1 + (fate == "twice")):
                ask = self.directory.apply_events(
                    node,
                    change.sequence_number,
                    change.inserted_hashes,
                    change.evicted_hashes,
                    self.now,
                )
                assert not (ask and self.is_synced[node])
                if ask:
                    self.send_snapshot(node)
            if self.is_synced[node]:
                self.expected_blocks[node] = set(self.caches[node])

    @rule()
    def deliver_late(self) -> None:
        for node, change in self.late_messages:
            before = self.directory.get_block_hashes(node)
            if self.directory.apply_events(
                node,
                change.sequence_number,
                change.inserted_hashes,
                change.evicted_hashes,
                self.now,
            ):
                self.send_snapshot(node)
            elif self.is_synced[node]:
                assert self.directory.get_block_hashes(node) == before
        self.late_messages.clear()

    @rule()
    def advance_time(self) -> None:
        self.now += SNAPSHOT_TIMEOUT_SECONDS

    @rule(node=st.sampled_from(NODES))
    def rejoin_node(self, node: Incarnation) -> None:
        self.directory.remove_node(node)
        self.directory.add_node(node, 12)
        self.journals[node].restart_numbering()
        self.late_messages = [(one, change) for one, change in self.late_messages if one != node]
        self.send_snapshot(node)

    @invariant()
    def directory_equals_model(self) -> None:
        told = {node: self.directory.get_block_hashes(node) for node in NODES}
        for node in NODES:
            if self.is_synced[node]:
                assert told[node] == {
                    short_hash(_block_hash(number)) for number in self.expected_blocks[node]
                }
        assert len(self.directory) == len(frozenset[int]().union(*told.values()))
        prompt = [short_hash(_block_hash(number)) for number in range(6)]
        depths = {
            node: next((d for d, name in enumerate(prompt) if name not in told[node]), 6)
            for node in NODES
        }
        assert self.directory.match_prefix(prompt) == {
            node: depth for node, depth in depths.items() if depth
        }


def _block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "big") + bytes(24))


TestPrefixDirectory = PrefixDirectoryMachine.TestCase


# the node's half


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=60))
def test_journal_reports_net_changes(steps: list[tuple[int, bool]]) -> None:
    journal, cache, told = CacheJournal(), set[int](), set[int]()
    for number, tell in steps:
        (journal.record_eviction if number in cache else journal.record_insertion)(
            _block_hash(number)
        )
        cache ^= {number}
        for change in journal.pop_events(0.0) if tell else ():
            assert not told & set(change.inserted_hashes)
            assert told >= set(change.evicted_hashes)
            told = told - set(change.evicted_hashes) | set(change.inserted_hashes)
    for change in journal.pop_events(0.0):
        told = told - set(change.evicted_hashes) | set(change.inserted_hashes)
    assert told == cache


def test_journal_messages_are_bounded_and_numbered() -> None:
    journal = CacheJournal()
    for number in range(MAX_HASHES_PER_BATCH + 1):
        journal.record_insertion(_block_hash(number))
    assert journal.is_flush_due(0.0)
    assert [(one.sequence_number, len(one.inserted_hashes)) for one in journal.pop_events(0.0)] == [
        (1, MAX_HASHES_PER_BATCH),
        (2, 1),
    ]
    assert not journal.is_flush_due(1.0)
    journal.record_insertion(_block_hash(0))
    assert not journal.is_flush_due(0.01)
    assert journal.is_flush_due(0.05)
    whole = list(journal.build_snapshot(map(_block_hash, range(MAX_HASHES_PER_BATCH + 1)), 1.0))
    assert [(one.sequence_number, one.is_reset, len(one.inserted_hashes)) for one in whole] == [
        (3, True, MAX_HASHES_PER_BATCH),
        (4, False, 1),
    ]
    assert not journal.is_flush_due(2.0)
    assert [(one.sequence_number, one.is_reset) for one in journal.build_snapshot([], 2.0)] == [
        (5, True)
    ]


@given(st.lists(st.sampled_from(["part", "tell", "begin", *range(12)]), max_size=80))
def test_snapshot_in_parts_survives_concurrent_changes(steps: list[str | int]) -> None:
    """Blocks have places, as in a pool; a part is told of three of them at a time."""
    journal, directory, numbers = CacheJournal(), PrefixDirectory(), itertools.count(1)
    directory.add_node(A, 100)
    places: list[int | None] = [None] * 6
    next_part: int | None = None

    def hear(changes: Iterable[CacheEventBatch]) -> None:
        for change in changes:
            assert change.sequence_number == next(numbers)
            if change.is_reset:
                directory.apply_snapshot(A, change.sequence_number, change.inserted_hashes)
            else:
                assert not directory.apply_events(
                    A, change.sequence_number, change.inserted_hashes, change.evicted_hashes, 0.0
                )

    def part() -> None:
        nonlocal next_part
        if next_part is not None and next_part < len(places):
            names = [
                _block_hash(number)
                for number in places[next_part : next_part + 3]
                if number is not None
            ]
            hear([journal.build_snapshot_part(names, 0.0, first=next_part == 0)])
            next_part += 3
        elif next_part is not None:
            hear(journal.end_snapshot(0.0))
            next_part = None

    def begin() -> None:
        nonlocal next_part
        journal.begin_snapshot()
        next_part = 0
        part()

    begin()
    for step in steps:
        if step == "part":
            part()
        elif step == "begin":
            begin()
        elif step == "tell":
            hear(journal.pop_events(0.0))
        elif isinstance(step, int) and step in places:
            places[places.index(step)] = None
            journal.record_eviction(_block_hash(step))
        elif isinstance(step, int) and None in places:
            places[
                len(places) - 1 - places[::-1].index(None) if step % 2 else places.index(None)
            ] = step
            journal.record_insertion(_block_hash(step))
    while next_part is not None:
        part()
    hear(journal.pop_events(0.0))
    assert directory.get_block_hashes(A) == {
        short_hash(_block_hash(number)) for number in places if number is not None
    }


class CountingDict(dict[int, int]):
    """Entries of a directory that count how often they are changed."""

    changes = 0

    def __setitem__(self, name: int, bits: int) -> None:
        self.changes += 1
        super().__setitem__(name, bits)

    def __delitem__(self, name: int) -> None:
        self.changes += 1
        super().__delitem__(name)


def count_changes(found: PrefixDirectory, call: Callable[[], object]) -> int:
    found._node_bits = [CountingDict(shard) for shard in found._node_bits]
    call()
    return sum(shard.changes for shard in found._node_bits if isinstance(shard, CountingDict))


def test_removed_pool_is_swept_in_slices() -> None:
    blocks = 3 * SWEEP_SLICE + 5
    found = PrefixDirectory()
    found.add_node(A, blocks)
    found.add_node(B, blocks)
    found.apply_snapshot(A, 1, range(blocks))
    found.apply_snapshot(B, 1, [0, 1])
    assert count_changes(found, lambda: found.apply_snapshot(A, 2, [0])) <= SWEEP_SLICE + 1
    assert found.match_prefix([0, 1, 2]) == {A: 1, B: 2}
    assert count_changes(found, lambda: found.remove_node(B)) == 0, "behind what waits already"
    assert found.match_prefix([0, 1]) == {A: 1}
    found.add_node(C, blocks)
    assert found.match_prefix([0, 1]) == {A: 1}, "a slot whose bit is still in entries is nobody's"
    turns = 1
    while count_changes(found, lambda: None) == 0 and found.needs_sweep:
        assert count_changes(found, found.sweep_slice) <= SWEEP_SLICE
        turns += 1
    assert turns >= 4
    assert len(found) == 1
    found.add_node(Incarnation("d"), blocks)
    assert found.match_prefix([0]) == {A: 1}


def test_brain_sweeps_removed_pool_in_background() -> None:
    world = BrainHarness()
    node = world.join_node("d0", DECODE, num_blocks=3 * SWEEP_SLICE)
    world.send_from_node(node, CacheSnapshot(1, tuple(range(3 * SWEEP_SLICE))))
    world.lose_node(node)
    directory, turns = world.brain.placement_state.prefix_directory, 0
    while (due := world.brain.next_tick_at()) is not None and due <= world.now:
        world.advance(0.0)
        turns += 1
    assert (len(directory), turns >= 3) == (0, True)
