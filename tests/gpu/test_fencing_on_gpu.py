"""Killed and frozen processes that write into this one's device memory; skipped without a GPU.

50 kills and 20 freezes. The writers are light processes (`kv_transfer.device.slow_writer`), started
beforehand, that hold and mark a byte of a fence file as a prefill node does. Every region is read
again at the end, seconds after the fence.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.shared_memory.fence import ArenaFences
from kv_transfer.device.cuda_driver_api import CudaError, CudaWorkDriver
from kv_transfer.device.device_fence import DeviceTicketFence
from kv_transfer.device.fence_self_test import FenceTrial, SlowWriter, check_fence, kill_and_watch
from kv_transfer.device.writer_process import WriterProof
from tests.gpu.figures import say


def _has_gpu() -> bool:
    try:
        CudaWorkDriver(0)
    except CudaError:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _has_gpu(), reason="the CUDA driver finds no GPU here"),
]
KILLS = {"running": 20, "full": 10, "queued": 8, "copies": 8, "forked": 4}
FREEZES = {"running": 12, "queued": 8}
BATCH = 10  # processes that wait at once
WATCH_SECONDS = 0.05
BACK_SECONDS = 0.5  # from the kill until the blocks may be given out
PROOF_SECONDS = 5.0
FROZEN_SECONDS = 0.15
QUEUED_SECONDS = 2.5  # until what is queued behind the spin has landed
REGION_BYTES = {"full": 4 << 20, "copies": 16 << 20}


@dataclass
class ReadyWriter:
    """A writer that is ready, with the fence of its ticket."""

    mode: str
    writer: SlowWriter
    proof: WriterProof
    fence: DeviceTicketFence
    byte: int


@pytest.fixture
def driver() -> CudaWorkDriver:
    return CudaWorkDriver(0)


@pytest.fixture
def fences(tmp_path: Path) -> Iterator[ArenaFences]:
    opened = ArenaFences(tmp_path / "baton-arena-test")
    yield opened
    opened.close()


def start_writers(
    stack: ExitStack, driver: CudaWorkDriver, fences: ArenaFences, modes: list[str]
) -> list[ReadyWriter]:
    folder = fences.path.parent
    writers = [
        stack.enter_context(SlowWriter(driver, folder, mode, REGION_BYTES.get(mode, 1 << 16)))
        for mode in modes
    ]
    with ThreadPoolExecutor() as threads:
        proofs = list(threads.map(SlowWriter.wait_until_ready, writers))
    waiting = []
    for mode, writer, proof in zip(modes, writers, proofs, strict=True):
        byte = fences.allocate_byte()
        fence = DeviceTicketFence(fences, byte)
        fence.proof = proof
        waiting.append(ReadyWriter(mode, writer, proof, fence, byte))
    return waiting


def kill(waiting: ReadyWriter, fences: ArenaFences) -> FenceTrial:
    waiting.writer.start_writing(fences.path, waiting.byte)
    time.sleep(0.05)  # so that a running write is in its middle, and a queued one has not begun
    assert not waiting.fence.try_fence(), "a living writer holds its byte"
    assert any(waiting.writer.read_region()) == (waiting.mode != "queued")
    return kill_and_watch(
        waiting.writer, waiting.fence.try_fence, WATCH_SECONDS, proof_seconds=PROOF_SECONDS
    )


def freeze(waiting: ReadyWriter, fences: ArenaFences) -> bool:
    """Freeze a writer, then kill it. Returns whether its device wrote while it was frozen."""
    waiting.writer.start_writing(fences.path, waiting.byte)
    time.sleep(0.05)  # as in `kill`
    os.kill(waiting.writer.process.pid, signal.SIGSTOP)
    before = waiting.writer.read_region()
    is_queued = waiting.mode == "queued"
    deadline = time.monotonic() + (QUEUED_SECONDS if is_queued else FROZEN_SECONDS)
    wrote = False
    while time.monotonic() < deadline and not (is_queued and wrote):
        assert not waiting.fence.try_fence(), "a frozen writer is not dead"
        time.sleep(0.005)  # nothing signals a change of device memory by another process
        wrote = wrote or waiting.writer.read_region() != before
    trial = kill_and_watch(
        waiting.writer, waiting.fence.try_fence, WATCH_SECONDS, proof_seconds=PROOF_SECONDS
    )
    assert not trial.changed_after_proof
    return wrote


def spread(counts: dict[str, int]) -> list[str]:
    """The modes in turn, so that every batch has several."""
    left, order = dict(counts), []
    while any(left.values()):
        for mode in left:
            if left[mode]:
                left[mode] -= 1
                order.append(mode)
    return order


def test_self_test_passes_and_takes_less_than_the_start_of_a_node(tmp_path: Path) -> None:
    started = time.monotonic()
    trial = check_fence(0, tmp_path)
    say(f"self-test: {time.monotonic() - started:.2f} s, {trial}")
    assert not trial.changed_after_proof


def test_nothing_is_written_after_the_fence_of_a_killed_writer(
    driver: CudaWorkDriver, fences: ArenaFences
) -> None:
    modes, trials = spread(KILLS), []
    started = time.monotonic()
    with ExitStack() as stack:
        finals: list[tuple[SlowWriter, bytes]] = []
        for first in range(0, len(modes), BATCH):
            for waiting in start_writers(stack, driver, fences, modes[first : first + BATCH]):
                trial = kill(waiting, fences)
                trials.append((waiting.mode, trial))
                finals.append((waiting.writer, waiting.writer.read_region()))
        changed_later = sum(writer.read_region() != final for writer, final in finals)
    for mode in KILLS:
        own = [trial for kind, trial in trials if kind == mode]
        proofs = sorted(trial.proof_seconds for trial in own)
        changes = sorted(trial.last_change_seconds for trial in own)
        say(
            f"{mode}: {len(own)} kills, proof {proofs[0] * 1e3:.0f}/"
            f"{proofs[len(own) // 2] * 1e3:.0f}/{proofs[-1] * 1e3:.0f} ms, last change seen "
            f"{changes[0] * 1e3:.0f}/{changes[-1] * 1e3:.0f} ms"
        )
    say(f"{len(trials)} kills in {time.monotonic() - started:.1f} s")
    assert len(trials) == sum(KILLS.values())
    assert not [mode for mode, trial in trials if trial.changed_after_proof]
    assert changed_later == 0
    assert max(trial.proof_seconds for _, trial in trials) < BACK_SECONDS


def test_a_frozen_writer_keeps_its_blocks(driver: CudaWorkDriver, fences: ArenaFences) -> None:
    modes, wrote = spread(FREEZES), []
    started = time.monotonic()
    with ExitStack() as stack:
        for first in range(0, len(modes), BATCH):
            for waiting in start_writers(stack, driver, fences, modes[first : first + BATCH]):
                wrote.append(freeze(waiting, fences))
    say(f"{len(wrote)} freezes in {time.monotonic() - started:.1f} s; {sum(wrote)} wrote frozen")
    assert all(wrote), "the device of a frozen process goes on: the test would see it"
