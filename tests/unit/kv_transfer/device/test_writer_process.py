"""The proof that a writer's process has ended, and where it is refused.

Processes are real; the file of a device's driver is an ordinary one. What a GPU's writes do is
tested by tests/gpu/test_fencing_on_gpu.py.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from baton.errors import UnmappableSegment
from baton.shared_memory.fence import ArenaFences, WriterFences
from baton.shared_memory.segment import (
    create_segment,
    remove_stale_segments,
    round_up_segment_bytes,
)
from kv_transfer.device.device_fence import DeviceTicketFence, DeviceTicketLock, WriterProofs
from kv_transfer.device.writer_process import (
    NO_DRIVER_FILE,
    ProvableWriter,
    UnprovableEnd,
    WriterProof,
    WriterRecord,
    name_writer,
    parse_writer,
)
from tests.contract.transfer_pair import wait_until

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def driver_file(tmp_path: Path) -> Path:
    path = tmp_path / "driver"
    path.touch()
    return path


@pytest.fixture
def fences(tmp_path: Path) -> Iterator[ArenaFences]:
    opened = ArenaFences(tmp_path / "baton-arena-test")
    yield opened
    opened.close()


class WaitingWriter:
    """A process of waiting_writer.py."""

    def __init__(self, folder: Path, driver_file: Path, fences: ArenaFences, fork: str) -> None:
        self.byte = fences.allocate_byte()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.unit.kv_transfer.device.waiting_writer",
                *(str(folder), str(driver_file), str(fences.path), str(self.byte)),
                *([fork] if fork else []),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        )
        assert self.process.stdout is not None
        self.name, child = self.process.stdout.readline().split()
        self.child = int(child)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def waiting_writer(
    folder: Path, driver_file: Path, fences: ArenaFences, fork: str = ""
) -> Iterator[WaitingWriter]:
    writer = WaitingWriter(folder, driver_file, fences, fork)
    try:
        yield writer
    finally:
        writer.process.kill()
        if writer.child:
            os.kill(writer.child, signal.SIGKILL)
        writer.process.communicate()


def make_fence(
    folder: Path, driver_file: Path, fences: ArenaFences, writer: WaitingWriter
) -> DeviceTicketFence:
    fence = DeviceTicketFence(fences, writer.byte)
    fence.proof = WriterProof(folder, writer.name, driver_file)
    return fence


def test_blocks_of_a_killed_writer_are_free_once_its_end_is_proven(
    tmp_path: Path, driver_file: Path, fences: ArenaFences
) -> None:
    with waiting_writer(tmp_path, driver_file, fences) as writer:
        fence = make_fence(tmp_path, driver_file, fences, writer)
        assert not fence.try_fence()
        writer.signal(signal.SIGKILL)
        wait_until(fence.try_fence)
        assert fence.try_fence(), "it stays fenced"


def test_a_frozen_writer_is_not_dead(
    tmp_path: Path, driver_file: Path, fences: ArenaFences
) -> None:
    with waiting_writer(tmp_path, driver_file, fences) as writer:
        fence = make_fence(tmp_path, driver_file, fences, writer)
        writer.signal(signal.SIGSTOP)
        os.waitpid(writer.process.pid, os.WUNTRACED)
        assert not fence.try_fence()
        assert fence.proof is not None
        assert not fence.proof.has_ended()


def test_a_forked_child_keeps_the_blocks_of_its_dead_parent(
    tmp_path: Path, driver_file: Path, fences: ArenaFences
) -> None:
    """The child has the driver's descriptors, and so what the device still does."""
    with waiting_writer(tmp_path, driver_file, fences, fork="fork") as writer:
        fence = make_fence(tmp_path, driver_file, fences, writer)
        writer.process.kill()
        writer.process.wait()
        assert not fence.try_fence()
        os.kill(writer.child, signal.SIGKILL)
        wait_until(fence.try_fence)
        writer.child = 0


def test_a_released_byte_of_a_dead_writer_is_no_proof(
    tmp_path: Path, driver_file: Path, fences: ArenaFences
) -> None:
    """The kernel drops the lock before a device stops: without the proof, nothing is free."""
    with waiting_writer(tmp_path, driver_file, fences) as writer:
        fence = DeviceTicketFence(fences, writer.byte)
        writer.process.kill()
        writer.process.wait()
        wait_until(lambda: fences.try_close_byte(writer.byte))
        assert not fence.try_fence()


def test_a_writer_that_has_ended_its_writes_needs_no_proof(tmp_path: Path) -> None:
    arena = create_segment(tmp_path, "arena", round_up_segment_bytes(1, 4096))
    fences = ArenaFences(arena.path)
    lock = DeviceTicketLock(WriterFences(tmp_path, arena.name), fences.allocate_byte())
    fence = DeviceTicketFence(fences, 0)
    assert lock.try_acquire()
    assert not fence.try_fence()
    lock.release()
    assert fence.try_fence()
    assert not lock.try_acquire(), "it comes too late"
    fences.close()
    arena.close()


def test_a_failed_device_keeps_its_blocks(tmp_path: Path) -> None:
    arena = create_segment(tmp_path, "arena", round_up_segment_bytes(1, 4096))
    fences = ArenaFences(arena.path)
    lock = DeviceTicketLock(WriterFences(tmp_path, arena.name), fences.allocate_byte())
    assert lock.try_acquire()
    lock.is_abandoned = True
    lock.release()
    assert not DeviceTicketFence(fences, 0).try_fence()
    fences.close()
    arena.close()


def test_a_lock_above_the_drivers_descriptors_is_refused(tmp_path: Path, driver_file: Path) -> None:
    driver = os.open(driver_file, os.O_RDWR)
    writer = ProvableWriter(tmp_path)
    with pytest.raises(UnprovableEnd, match="not below"):
        writer.publish("test", driver_file)
    assert writer.name == ""
    writer.close()
    os.close(driver)


def test_a_writer_that_closes_keeps_its_locks_until_its_process_has_ended(
    tmp_path: Path, driver_file: Path
) -> None:
    """Its device may have work left that nobody waited for."""
    writer = ProvableWriter(tmp_path)
    driver = os.open(driver_file, os.O_RDWR)
    writer.publish("test", driver_file)
    proof = WriterProof(tmp_path, writer.name, driver_file)
    writer.close()
    assert not proof._are_locks_released()
    assert not proof.has_ended()
    proof.close()
    os.close(driver)
    os.close(writer._fd)


def test_a_process_without_a_descriptor_of_the_driver_is_refused(
    tmp_path: Path, driver_file: Path
) -> None:
    writer = ProvableWriter(tmp_path)
    with pytest.raises(UnprovableEnd, match="no descriptor"):
        writer.publish("test", driver_file)
    writer.close()


def _write_record(folder: Path, name: str, record: WriterRecord) -> None:
    (folder / name).write_bytes(msgspec.json.encode(record))


def test_writers_that_cannot_be_proven_dead_here_are_refused(
    tmp_path: Path, driver_file: Path
) -> None:
    writer = ProvableWriter(tmp_path)
    writer.publish("test", NO_DRIVER_FILE)
    right = msgspec.json.decode((tmp_path / writer.name).read_bytes(), type=WriterRecord)
    for folder, name, record, file, reason in (
        (tmp_path, "../../etc/passwd", right, NO_DRIVER_FILE, "not the name"),
        (tmp_path, "baton-writer-" + "0" * 32 + ".process", right, NO_DRIVER_FILE, "No such file"),
        (
            tmp_path,
            writer.name,
            msgspec.structs.replace(right, pid_namespace="pid:[1]"),
            NO_DRIVER_FILE,
            "another pid namespace",
        ),
        (tmp_path, writer.name, right, driver_file, "another file"),
    ):
        if (folder / name).parent == tmp_path and (folder / name).exists():
            _write_record(folder, name, record)
        with pytest.raises(UnmappableSegment, match=reason):
            WriterProof(folder, name, file)
    (tmp_path / writer.name).write_bytes(b"\x80\x04\x95")
    with pytest.raises(UnmappableSegment, match="damaged"):
        WriterProof(tmp_path, writer.name, NO_DRIVER_FILE)
    writer.close()


def test_a_writer_that_has_ended_before_its_open_is_refused(
    tmp_path: Path, driver_file: Path, fences: ArenaFences
) -> None:
    with waiting_writer(tmp_path, driver_file, fences) as writer:
        writer.process.kill()
        writer.process.wait()
        with pytest.raises(UnmappableSegment):
            WriterProofs(tmp_path, driver_file).get(writer.name)
        assert remove_stale_segments(tmp_path) == [writer.name]


def test_a_living_writers_file_is_not_stale(tmp_path: Path) -> None:
    writer = ProvableWriter(tmp_path)
    writer.publish("test", NO_DRIVER_FILE)
    assert remove_stale_segments(tmp_path) == []
    proofs = WriterProofs(tmp_path, NO_DRIVER_FILE)
    assert proofs.get(writer.name) is proofs.get(writer.name)
    assert parse_writer(name_writer(writer.name)) == writer.name
    assert parse_writer("tcp://127.0.0.1:1") == parse_writer("device://../x") == ""
    proofs.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []
