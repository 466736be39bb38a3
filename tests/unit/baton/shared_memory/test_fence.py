import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import PeerUnreachable
from baton.shared_memory.fence import ArenaFences, WriterFences
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.shared_memory.segment import Segment, create_segment

WRITE = """
import sys
from pathlib import Path
from baton.shared_memory.fence import WriterFences
fences = WriterFences(Path(sys.argv[1]), sys.argv[2])
print(fences.try_lock_byte(int(sys.argv[3])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Segment]:
    segment = create_segment(tmp_path, "arena", HUGE_PAGE)
    yield segment
    segment.close()


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


def test_fence_bytes_are_never_reused(owner: ArenaFences) -> None:
    assert len({owner.allocate_byte() for _ in range(1000)}) == 1000


def test_a_closed_byte_stays_closed(owner: ArenaFences, writer: WriterFences) -> None:
    byte = owner.allocate_byte()
    assert owner.try_close_byte(byte)
    assert owner.try_close_byte(byte)
    assert not writer.try_lock_byte(byte)


def test_byte_cannot_be_closed_while_a_writer_holds_it(
    owner: ArenaFences, writer: WriterFences
) -> None:
    byte, other = owner.allocate_byte(), owner.allocate_byte()
    assert writer.try_lock_byte(byte)
    assert writer.try_lock_byte(byte)
    assert not owner.try_close_byte(byte)
    assert owner.try_close_byte(other)
    writer.unlock_byte(byte)
    assert owner.try_close_byte(byte)
    assert not writer.try_lock_byte(byte)


def test_unlocking_an_unheld_byte_keeps_the_owners_lock(
    owner: ArenaFences, writer: WriterFences
) -> None:
    byte = owner.allocate_byte()
    assert owner.try_close_byte(byte)
    writer.unlock_byte(byte)
    assert not writer.try_lock_byte(byte)


def test_second_writer_cannot_lock_a_held_byte(
    arena: Segment, owner: ArenaFences, writer: WriterFences
) -> None:
    second = WriterFences(arena.path.parent, arena.name)
    byte = owner.allocate_byte()
    assert writer.try_lock_byte(byte)
    assert not second.try_lock_byte(byte)
    second.close()
    assert not owner.try_close_byte(byte)


def test_closing_the_descriptor_drops_every_byte(arena: Segment, owner: ArenaFences) -> None:
    leaving = WriterFences(arena.path.parent, arena.name)
    first, second = owner.allocate_byte(), owner.allocate_byte()
    assert leaving.try_lock_byte(first)
    assert leaving.try_lock_byte(second)
    leaving.close()
    assert owner.try_close_byte(first)
    assert owner.try_close_byte(second)


def test_descriptors_are_not_inherited(owner: ArenaFences, writer: WriterFences) -> None:
    assert not os.get_inheritable(owner._fd)
    assert not os.get_inheritable(writer._fd)


def test_a_frozen_process_keeps_its_byte_and_a_killed_one_does_not(
    arena: Segment, owner: ArenaFences
) -> None:
    byte = owner.allocate_byte()
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(arena.path.parent), arena.name, str(byte)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[4],
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "True"
        process.send_signal(signal.SIGSTOP)
        assert not owner.try_close_byte(byte)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert owner.try_close_byte(byte)


def test_missing_fence_file_is_peer_unreachable(arena: Segment, tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachable, match="fence of segment"):
        WriterFences(tmp_path, arena.name)
    with pytest.raises(PeerUnreachable, match="is not a segment name"):
        WriterFences(tmp_path, "../arena")
