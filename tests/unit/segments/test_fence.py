import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import PeerGone
from baton.fence import ArenaFences, WriterFences
from baton.memory_map import HUGE_PAGE
from baton.segment import Segment, create

WRITE = """
import sys
from pathlib import Path
from baton.fence import WriterFences
fences = WriterFences(Path(sys.argv[1]), sys.argv[2])
print(fences.take(int(sys.argv[3])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Segment]:
    made = create(tmp_path, "arena", HUGE_PAGE)
    yield made
    made.close()


@pytest.fixture
def owner(arena: Segment) -> Iterator[ArenaFences]:
    fences = ArenaFences(arena.path)
    yield fences
    fences.close()


@pytest.fixture
def writer(arena: Segment, owner: ArenaFences) -> Iterator[WriterFences]:
    fences = WriterFences(arena.path.parent, arena.name)
    yield fences
    fences.close()


def test_bytes_are_never_minted_twice(owner: ArenaFences) -> None:
    assert len({owner.mint() for _ in range(1000)}) == 1000


def test_a_closed_byte_stays_closed(owner: ArenaFences, writer: WriterFences) -> None:
    byte = owner.mint()
    assert owner.close_off(byte)
    assert owner.close_off(byte)
    assert not writer.take(byte)


def test_a_writer_holds_decode_off_until_it_drops(owner: ArenaFences, writer: WriterFences) -> None:
    byte, other = owner.mint(), owner.mint()
    assert writer.take(byte)
    assert writer.take(byte)
    assert not owner.close_off(byte)
    assert owner.close_off(other)
    writer.drop(byte)
    assert owner.close_off(byte)
    assert not writer.take(byte)


def test_dropping_what_is_not_held_frees_nothing_of_the_owners(owner: ArenaFences, writer: WriterFences) -> None:
    byte = owner.mint()
    assert owner.close_off(byte)
    writer.drop(byte)
    assert not writer.take(byte)


def test_two_writers_of_one_arena_do_not_meet(arena: Segment, owner: ArenaFences, writer: WriterFences) -> None:
    second = WriterFences(arena.path.parent, arena.name)
    byte = owner.mint()
    assert writer.take(byte)
    assert not second.take(byte)
    second.close()
    assert not owner.close_off(byte)


def test_closing_the_descriptor_drops_every_byte(arena: Segment, owner: ArenaFences) -> None:
    leaving = WriterFences(arena.path.parent, arena.name)
    first, second = owner.mint(), owner.mint()
    assert leaving.take(first)
    assert leaving.take(second)
    leaving.close()
    assert owner.close_off(first)
    assert owner.close_off(second)


def test_descriptors_are_not_inherited(owner: ArenaFences, writer: WriterFences) -> None:
    assert not os.get_inheritable(owner._fd)
    assert not os.get_inheritable(writer._fd)


def test_a_frozen_process_keeps_its_byte_and_a_killed_one_does_not(arena: Segment, owner: ArenaFences) -> None:
    byte = owner.mint()
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(arena.path.parent), arena.name, str(byte)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "True"
        process.send_signal(signal.SIGSTOP)
        assert not owner.close_off(byte)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert owner.close_off(byte)


def test_a_fence_that_is_not_there_is_a_peer_that_is_gone(arena: Segment, tmp_path: Path) -> None:
    with pytest.raises(PeerGone, match="fence of segment"):
        WriterFences(tmp_path, arena.name)
    with pytest.raises(PeerGone, match="is not a segment name"):
        WriterFences(tmp_path, "../arena")
