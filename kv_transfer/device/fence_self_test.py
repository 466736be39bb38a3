"""Tries at start, on this very host, what proves that a killed writer writes no more.

A small process writes into device memory of this one and is killed. When its end is proven
(`WriterProof`), the memory is read twice. If it changes in between, or the proof does not come in
time, the rule does not hold here, and no peer may write into this node's device memory.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.errors import UnmappableSegment
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaError, CudaWorkDriver
from kv_transfer.device.writer_process import WriterProof

_REGION_BYTES = 1 << 16
_PROOF_SECONDS = 1.0  # for the proof after the kill; 0.05 to 0.1 on an idle host
_WATCH_SECONDS = 0.03  # twice the longest time that a running kernel wrote on after a kill
_ANSWER_SECONDS = 20.0  # for the writer to start: it may have to wait for the driver
_START_SECONDS = 10.0
_POLL_SECONDS = 0.002
_WRITE_SECONDS = 20.0  # for which the writer writes if nobody kills it


@dataclass(frozen=True, slots=True)
class FenceTrial:
    """What one kill has shown. Times are seconds from the kill."""

    proof_seconds: float
    last_change_seconds: float  # when the memory was last seen to change
    changed_after_proof: bool


class FenceFailed(Exception):
    """The end of a writer cannot be proven on this host. The message says why."""


class SlowWriter:
    """A process that writes into a region of this process's device memory."""

    def __init__(
        self,
        driver: CudaWorkDriver,
        folder: Path,
        mode: str,
        region_bytes: int = _REGION_BYTES,
        device: int = 0,
    ) -> None:
        """`device`: index of the GPU that writes."""
        self._driver = driver
        self._folder = folder
        self._size = region_bytes
        self._name = ""  # of its file, which nobody else removes after a kill
        self.region = driver.allocate(region_bytes)
        driver.clear(self.region, region_bytes)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kv_transfer.device.slow_writer",
                str(folder),
                str(device),
                mode,
                str(_WRITE_SECONDS),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def wait_until_ready(self) -> WriterProof:
        """Wait until the process has opened its device. Raises FenceFailed, UnmappableSegment."""
        self._name = self._read_line()
        return WriterProof(self._folder, self._name, Path(UVM_FILE))

    def start_writing(self, fence: Path | None = None, byte: int = 0) -> None:
        """Let the process write, under a byte of a fence file if one is given.

        Raises FenceFailed.
        """
        assert self.process.stdin is not None
        start, _ = self._driver.find_allocation(self.region)
        handle = self._driver.export_memory(start).hex()
        lock = "-" if fence is None else fence
        self.process.stdin.write(f"{handle} {self.region - start} {self._size} {lock} {byte}\n")
        self.process.stdin.flush()
        if self._read_line() != "writing":
            raise FenceFailed("the writer of the self-test did not start")

    def read_region(self) -> bytes:
        return self._driver.read(self.region, self._size)

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if not select.select([self.process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise FenceFailed(f"the writer of the self-test gave no answer for {_ANSWER_SECONDS} s")
        line = self.process.stdout.readline().strip()
        if not line:
            self.process.kill()
            error = self.process.stderr.read().strip().rpartition("\n")[2]
            raise FenceFailed(f"the writer of the self-test failed: {error[:300]}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()
        if self._name:
            (self._folder / self._name).unlink(missing_ok=True)
        if error is None:  # otherwise it may be written still
            self._driver.free(self.region)


def kill_and_watch(
    writer: SlowWriter,
    has_ended: Callable[[], bool],
    watch_seconds: float,
    proof_seconds: float = _PROOF_SECONDS,
) -> FenceTrial:
    """Kill a writer and compare what it has written when its end is proven and later.

    Raises FenceFailed if the proof does not come within `proof_seconds`.
    """
    killed_at = time.monotonic()
    writer.process.kill()
    last, changed_at = writer.read_region(), 0.0
    while not has_ended():
        seen, now = writer.read_region(), time.monotonic() - killed_at
        if seen != last:
            last, changed_at = seen, now
        if now > proof_seconds:
            raise FenceFailed(f"the end of a killed writer was not proven in {proof_seconds} s")
        writer.process.poll()
        time.sleep(_POLL_SECONDS)  # nothing signals a change of device memory by another process
    proven_at = time.monotonic() - killed_at
    at_proof = writer.read_region()
    time.sleep(watch_seconds)  # for a late write, which would show that the proof is none
    return FenceTrial(proven_at, changed_at, writer.read_region() != at_proof)


def check_fence(device_index: int, folder: Path) -> FenceTrial:
    """Kill a slow writer and compare. Raises FenceFailed if the rule does not hold here."""
    try:
        driver = CudaWorkDriver(device_index)
        with SlowWriter(driver, folder, "running", device=device_index) as writer:
            proof = writer.wait_until_ready()
            writer.start_writing()
            before = writer.read_region()
            _wait_for_change(writer, before)
            trial = kill_and_watch(writer, proof.has_ended, _WATCH_SECONDS)
            if trial.changed_after_proof:
                raise FenceFailed("a killed writer wrote on after its end was proven")
            return trial
    except (CudaError, UnmappableSegment, OSError) as error:
        raise FenceFailed(str(error)) from error


def _wait_for_change(writer: SlowWriter, before: bytes) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while writer.read_region() == before:
        if time.monotonic() > deadline:
            raise FenceFailed("the writer of the self-test wrote nothing that is seen here")
        time.sleep(_POLL_SECONDS)  # nothing signals a change of device memory
