"""The directory against a model: whatever is lost, late or repeated, it never has more than the node last said, and a
snapshot makes it right again."""

import itertools
from collections.abc import Callable, Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.block_hash import BlockHash, short_name
from baton.cache_journal import MAX_NAMES, CacheChange, CacheJournal
from baton.types import Incarnation
from coordinator.core import messages as m
from coordinator.core.prefix_directory import PATIENCE, SLICE, PrefixDirectory
from tests.unit.coordinator_core.world import DECODE, World

A, B, C = (Incarnation(name) for name in "abc")
NODES = (A, B, C)
NAMES = st.integers(0, 11)


def directory(**held: Sequence[int]) -> PrefixDirectory:
    found = PrefixDirectory()
    for node, names in held.items():
        found.join(Incarnation(node), 100)
        found.snapshot(Incarnation(node), 1, names)
    return found


def test_how_deep_each_node_holds_a_prompt() -> None:
    found = directory(a=[1, 2, 3], b=[1, 3], c=[2, 3])
    assert found.match([1, 2, 3, 4]) == {A: 3, B: 1}
    assert found.match([9, 1]) == {}
    assert found.match([]) == {}
    assert len(found) == 3


def test_names_are_read_no_further_than_somebody_has_them() -> None:
    read: list[int] = []

    def names() -> list[int]:
        for name in (1, 2, 3, 4):
            read.append(name)
            yield name

    assert directory(a=[1]).match(names()) == {A: 1}  # type: ignore[arg-type]
    assert read == [1, 2]


def test_a_node_that_leaves_takes_its_blocks_along_and_its_place_is_used_again() -> None:
    found = directory(a=[1, 2], b=[1])
    found.leave(A)
    found.leave(A)
    assert found.match([1, 2]) == {B: 1}
    found.join(C, 100)
    assert found.match([1, 2]) == {B: 1}
    found.snapshot(C, 1, [1, 2])
    assert found.match([1, 2]) == {B: 1, C: 2}
    assert len(found) == 2


def test_a_gap_is_answered_with_a_question_and_what_is_known_stays() -> None:
    found = directory(a=[1])
    assert not found.events(A, 2, [2], [], 0.0)
    assert found.events(A, 4, [4], [1], 0.0)  # 3 is missing
    assert not found.events(A, 5, [5], [], PATIENCE / 2)
    assert found.match([1, 2]) == {A: 2}
    assert found.events(A, 6, [6], [], PATIENCE)  # the question or its answer was lost
    assert found.resyncs == 2
    found.snapshot(A, 7, [4, 5, 6])
    assert not found.events(A, 8, [7], [], PATIENCE)
    assert found.blocks_of(A) == {4, 5, 6, 7}


def test_nothing_counts_before_the_first_snapshot() -> None:
    found = PrefixDirectory()
    found.join(A, 100)
    assert found.events(A, 1, [1], [], 0.0)
    assert found.match([1]) == {}


def test_repeats_and_late_snapshots_change_nothing() -> None:
    found = directory(a=[1])
    assert not found.events(A, 2, [], [1], 0.0)
    assert not found.events(A, 2, [1], [], 0.0)
    found.snapshot(A, 1, [1])
    assert found.blocks_of(A) == frozenset()


def test_nobody_is_believed_to_hold_more_than_it_has_blocks() -> None:
    found = PrefixDirectory()
    found.join(A, 2)
    found.snapshot(A, 1, [1, 2, 3])
    found.events(A, 2, [4], [1], 0.0)
    assert found.blocks_of(A) == {2, 4}


class DirectoryMachine(RuleBasedStateMachine):
    """Nodes with real journals, whose messages are delivered, lost, or held back and delivered late."""

    @initialize()
    def begin(self) -> None:
        self.directory, self.now = PrefixDirectory(), 0.0
        self.caches: dict[Incarnation, set[int]] = {node: set() for node in NODES}
        self.journals = {node: CacheJournal() for node in NODES}
        self.last_told = {node: set[int]() for node in NODES}  # what the directory must have of nodes in step
        self.in_step = dict.fromkeys(NODES, False)
        self.late: list[tuple[Incarnation, CacheChange]] = []
        for node in NODES:
            self.directory.join(node, 12)
            self.snapshot(node)

    def snapshot(self, node: Incarnation) -> None:
        names = [_name(number) for number in sorted(self.caches[node])]
        for change in self.journals[node].take_snapshot(names, self.now):
            self.directory.snapshot(node, change.sequence, change.inserted)
        self.in_step[node], self.last_told[node] = True, set(self.caches[node])

    @rule(node=st.sampled_from(NODES), number=NAMES)
    def toggle(self, node: Incarnation, number: int) -> None:
        cache, journal = self.caches[node], self.journals[node]
        (journal.lost if number in cache else journal.gained)(_name(number))
        cache ^= {number}

    @rule(node=st.sampled_from(NODES), fate=st.sampled_from(["arrives", "twice", "lost", "late"]))
    def tell(self, node: Incarnation, fate: str) -> None:
        for change in self.journals[node].take(self.now):
            if fate in ("lost", "late"):
                self.in_step[node] = False
                self.late += [(node, change)] if fate == "late" else []
                continue
            for _ in range(1 + (fate == "twice")):
                ask = self.directory.events(node, change.sequence, change.inserted, change.evicted, self.now)
                assert not (ask and self.in_step[node])
                if ask:
                    self.snapshot(node)
            if self.in_step[node]:
                self.last_told[node] = set(self.caches[node])

    @rule()
    def deliver_late(self) -> None:
        for node, change in self.late:
            before = self.directory.blocks_of(node)
            if self.directory.events(node, change.sequence, change.inserted, change.evicted, self.now):
                self.snapshot(node)
            elif self.in_step[node]:
                assert self.directory.blocks_of(node) == before
        self.late.clear()

    @rule()
    def time_passes(self) -> None:
        self.now += PATIENCE

    @rule(node=st.sampled_from(NODES))
    def rejoin(self, node: Incarnation) -> None:
        self.directory.leave(node)
        self.directory.join(node, 12)
        self.journals[node].restart()
        self.late = [(one, change) for one, change in self.late if one != node]
        self.snapshot(node)

    @invariant()
    def equals_the_model(self) -> None:
        told = {node: self.directory.blocks_of(node) for node in NODES}
        for node in NODES:
            if self.in_step[node]:
                assert told[node] == {short_name(_name(number)) for number in self.last_told[node]}
        assert len(self.directory) == len(frozenset[int]().union(*told.values()))
        prompt = [short_name(_name(number)) for number in range(6)]
        depths = {node: next((d for d, name in enumerate(prompt) if name not in told[node]), 6) for node in NODES}
        assert self.directory.match(prompt) == {node: depth for node, depth in depths.items() if depth}


def _name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(8, "big") + bytes(24))


TestDirectory = DirectoryMachine.TestCase


# the node's half


@given(st.lists(st.tuples(NAMES, st.booleans()), max_size=60))
def test_a_journal_tells_the_difference_and_no_more(steps: list[tuple[int, bool]]) -> None:
    journal, cache, told = CacheJournal(), set[int](), set[int]()
    for number, tell in steps:
        (journal.lost if number in cache else journal.gained)(_name(number))
        cache ^= {number}
        for change in journal.take(0.0) if tell else ():
            assert not told & set(change.inserted)
            assert told >= set(change.evicted)
            told = told - set(change.evicted) | set(change.inserted)
    for change in journal.take(0.0):
        told = told - set(change.evicted) | set(change.inserted)
    assert told == cache


def test_messages_of_a_journal_are_bounded_and_numbered() -> None:
    journal = CacheJournal()
    for number in range(MAX_NAMES + 1):
        journal.gained(_name(number))
    assert journal.is_due(0.0)
    assert [(one.sequence, len(one.inserted)) for one in journal.take(0.0)] == [(1, MAX_NAMES), (2, 1)]
    assert not journal.is_due(1.0)
    journal.gained(_name(0))
    assert not journal.is_due(0.01)
    assert journal.is_due(0.05)
    whole = list(journal.take_snapshot(map(_name, range(MAX_NAMES + 1)), 1.0))
    assert [(one.sequence, one.fresh, len(one.inserted)) for one in whole] == [(3, True, MAX_NAMES), (4, False, 1)]
    assert not journal.is_due(2.0)
    assert [(one.sequence, one.fresh) for one in journal.take_snapshot([], 2.0)] == [(5, True)]


@given(st.lists(st.sampled_from(["part", "tell", "begin", *range(12)]), max_size=80))
def test_a_snapshot_in_parts_is_right_whatever_changes_in_between(steps: list[str | int]) -> None:
    """Blocks have places, as in a pool; a part is told of three of them at a time."""
    journal, directory, numbers = CacheJournal(), PrefixDirectory(), itertools.count(1)
    directory.join(A, 100)
    places: list[int | None] = [None] * 6
    next_part: int | None = None

    def hear(changes: Iterable[CacheChange]) -> None:
        for change in changes:
            assert change.sequence == next(numbers)
            if change.fresh:
                directory.snapshot(A, change.sequence, change.inserted)
            else:
                assert not directory.events(A, change.sequence, change.inserted, change.evicted, 0.0)

    def part() -> None:
        nonlocal next_part
        if next_part is not None and next_part < len(places):
            names = [_name(number) for number in places[next_part : next_part + 3] if number is not None]
            hear([journal.take_part(names, 0.0, first=next_part == 0)])
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
            hear(journal.take(0.0))
        elif isinstance(step, int) and step in places:
            places[places.index(step)] = None
            journal.lost(_name(step))
        elif isinstance(step, int) and None in places:
            places[len(places) - 1 - places[::-1].index(None) if step % 2 else places.index(None)] = step
            journal.gained(_name(step))
    while next_part is not None:
        part()
    hear(journal.take(0.0))
    assert directory.blocks_of(A) == {short_name(_name(number)) for number in places if number is not None}


class CountedNames(dict[int, int]):
    """Entries of a directory that count how often they are changed."""

    changes = 0

    def __setitem__(self, name: int, bits: int) -> None:
        self.changes += 1
        super().__setitem__(name, bits)

    def __delitem__(self, name: int) -> None:
        self.changes += 1
        super().__delitem__(name)


def counted(found: PrefixDirectory, call: Callable[[], object]) -> int:
    found._holders = [CountedNames(shard) for shard in found._holders]
    call()
    return sum(shard.changes for shard in found._holders if isinstance(shard, CountedNames))


def test_what_a_large_pool_had_is_swept_in_slices_and_means_nothing_until_then() -> None:
    blocks = 3 * SLICE + 5
    found = PrefixDirectory()
    found.join(A, blocks)
    found.join(B, blocks)
    found.snapshot(A, 1, range(blocks))
    found.snapshot(B, 1, [0, 1])
    assert counted(found, lambda: found.snapshot(A, 2, [0])) <= SLICE + 1
    assert found.match([0, 1, 2]) == {A: 1, B: 2}
    assert counted(found, lambda: found.leave(B)) == 0, "behind what waits already"
    assert found.match([0, 1]) == {A: 1}
    found.join(C, blocks)
    assert found.match([0, 1]) == {A: 1}, "a slot whose bit is still in entries is nobody's"
    turns = 1
    while counted(found, lambda: None) == 0 and found.is_to_sweep:
        assert counted(found, found.sweep) <= SLICE
        turns += 1
    assert turns >= 4
    assert len(found) == 1
    found.join(Incarnation("d"), blocks)
    assert found.match([0]) == {A: 1}


def test_a_brain_tidies_up_after_a_large_pool_without_being_asked() -> None:
    world = World()
    node = world.join("d0", DECODE, num_blocks=3 * SLICE)
    world.say(node, m.CacheSnapshot(1, tuple(range(3 * SLICE))))
    world.gone(node)
    directory, turns = world.brain.knowledge.directory, 0
    while (due := world.brain.next_due()) is not None and due <= world.now:
        world.advance(0.0)
        turns += 1
    assert (len(directory), turns >= 3) == (0, True)
