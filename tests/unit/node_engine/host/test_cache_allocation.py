"""A node's cache that grows while the node serves."""

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from baton.process.failpoints import FAILPOINTS
from baton.shared_memory import segment_memory
from baton.shared_memory.available_memory import AvailableMemory
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.shared_memory.segment import Segment, create_segment
from node_engine.host.cache_memory import CacheMemory

BLOCK = 1 << 16
SIZE = 32 * HUGE_PAGE
NUM_BLOCKS = SIZE // BLOCK


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with closing(create_segment(tmp_path, "arena", SIZE, initial_bytes=1)) as segment:
        yield segment


def test_a_block_gets_memory_before_it_is_used(segment: Segment) -> None:
    memory = CacheMemory(segment, BLOCK)
    first = memory.num_backed_blocks
    assert 0 < first < NUM_BLOCKS
    assert memory.back_blocks(0) == memory.back_blocks(first) == first
    assert first < memory.back_blocks(first + 1) < NUM_BLOCKS
    assert memory.back_blocks(NUM_BLOCKS) == NUM_BLOCKS


def test_a_thread_allocates_the_rest(segment: Segment) -> None:
    memory = CacheMemory(segment, BLOCK)
    memory.start_allocation(lambda: pytest.fail("there is enough"))
    for thread in threading.enumerate():
        if thread.name == "cache-memory":
            thread.join()
    assert memory.num_backed_blocks == NUM_BLOCKS
    memory.stop_allocation()


def test_a_thread_that_may_not_change_its_priority_allocates_the_rest(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    test_a_thread_allocates_the_rest(segment)


def test_a_block_is_allocated_at_once_while_the_thread_waits(segment: Segment) -> None:
    memory = CacheMemory(segment, BLOCK)
    FAILPOINTS.arm("cache.allocate.before=delay(1)*1")
    try:
        memory.start_allocation(lambda: pytest.fail("there is enough"))
        assert memory.back_blocks(NUM_BLOCKS) == NUM_BLOCKS
    finally:
        memory.stop_allocation()
        FAILPOINTS.arm("")


def test_the_node_is_told_once_that_there_is_no_memory_left(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = CacheMemory(segment, BLOCK)
    first = memory.num_backed_blocks
    monkeypatch.setattr(
        segment_memory, "measure_available_memory", lambda _: AvailableMemory(0, "left", 0)
    )
    exhausted = threading.Semaphore(0)
    memory.start_allocation(exhausted.release)
    assert exhausted.acquire(timeout=30)
    assert memory.back_blocks(NUM_BLOCKS) == first
    memory.stop_allocation()
    assert not exhausted.acquire(blocking=False)


def test_the_node_is_told_if_memory_ended_before_it_served(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = CacheMemory(segment, BLOCK)
    monkeypatch.setattr(
        segment_memory, "measure_available_memory", lambda _: AvailableMemory(0, "left", 0)
    )
    assert memory.back_blocks(NUM_BLOCKS) < NUM_BLOCKS
    told: list[bool] = []
    memory.start_allocation(lambda: told.append(True))
    memory.stop_allocation()
    assert told == [True]


def test_a_node_that_stops_does_not_allocate_the_rest(segment: Segment) -> None:
    memory = CacheMemory(segment, BLOCK)
    memory.stop_allocation()
    memory.start_allocation(lambda: pytest.fail("it was not tried"))
    assert memory.num_backed_blocks < NUM_BLOCKS
    assert segment.memory.max_bytes == SIZE, "nothing was given up"
