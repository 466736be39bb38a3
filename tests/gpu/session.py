"""Runs what needs a GPU for KV between GPUs, most important first, each stage with a time limit.

    python -m tests.gpu.session --out FOLDER [--stages fencing,kernel,...] [--seconds 480]

Tests run beside each other, and with two GPUs a second time on one of them; stages that measure
run alone. Each stage's output goes to FOLDER/NAME.log. A stage that fails or runs out of time does
not stop the others. The summary is printed and written to FOLDER/summary.txt.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.device.cuda_driver_api import CudaDriver

ROOT = Path(__file__).resolve().parents[2]
_LAST_LINES = 24  # of a stage's output that the summary shows
_TESTS_AT_ONCE = 6
_ONE_GPU = "_one_gpu"  # ends the name of a stage that sees one GPU
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class SessionStage:
    """One command of a session."""

    name: str
    seconds: float  # at most
    command: tuple[str, ...]  # arguments of Python
    is_alone: bool = True  # because it measures; else beside others


def _pytest(*paths: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-s", "-rs", "--durations=5", "-p", "no:cacheprovider", *paths)


def _ttft(transport: str) -> tuple[str, ...]:
    """TTFT of a colocated node and of one prefill and one decode node, one client at a time."""
    return (
        *("-m", "benchmarks", "gpu", "--only", "served", "--served-1p1d", "--seconds", "230"),
        *("--rows", "128/32:1;2048/32:1", "--rounds", "3", "--vllm", ""),
        *("--set", f"transport={transport}"),
    )


_TESTS = {
    "kernel": (90, _pytest("tests/gpu/test_slab_moves_on_gpu.py")),
    "contract": (
        150,
        _pytest("-p", "tests.gpu.cuda_pairs", "tests/contract", "-k", "cuda_ipc", "--maxfail=8"),
    ),
    "handoff": (240, _pytest("tests/gpu/test_handoff_on_gpu.py")),
    "parity": (280, _pytest("tests/parity/test_cluster_parity.py")),
    "chaos": (150, _pytest("tests/chaos", "--chaos-stage", "gpu", "--chaos-rounds", "3")),
}
STAGES = (
    *(SessionStage(name, *test, is_alone=False) for name, test in _TESTS.items()),
    *(SessionStage(f"{name}{_ONE_GPU}", *test, is_alone=False) for name, test in _TESTS.items()),
    SessionStage("fencing", 170, _pytest("tests/gpu/test_fencing_on_gpu.py")),
    SessionStage("slowdown", 240, ("-m", "benchmarks.device.handoff_slowdown")),
    SessionStage("ttft_ipc", 240, _ttft("auto")),
    SessionStage("ttft_shm", 240, _ttft("shm")),
    SessionStage("copies", 90, ("-m", "benchmarks.device.peer_copies")),
)


def run_stage(stage: SessionStage, folder: Path, seconds: float) -> str:
    """Run a stage; returns its lines of the summary."""
    log = folder / f"{stage.name}.log"
    started = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PYTHONUNBUFFERED": "1"}
    if stage.name.endswith(_ONE_GPU):
        environ[_VISIBLE_DEVICES] = os.environ.get(_VISIBLE_DEVICES, "0").split(",")[0]
    if inherited := os.environ.get("PYTHONPATH"):
        environ["PYTHONPATH"] += f":{inherited}"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environ,
            start_new_session=True,
        )
        try:
            ended = f"exit code {process.wait(timeout=seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            ended = f"killed after {seconds:.0f} s"
    tail = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    took = time.monotonic() - started
    return "\n".join([f"== {stage.name}: {ended}, {took:.1f} s", *(f"   {line}" for line in tail)])


class SessionSummary:
    """What is known of the stages that have ended. Any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.write_text("")

    def add_stage(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            with self._path.open("a") as file:
                file.write(text + "\n")


def run_stages(stages: Sequence[SessionStage], folder: Path, seconds: float) -> None:
    """Run tests beside each other, then what measures."""
    deadline = time.monotonic() + seconds
    summary = SessionSummary(folder / "summary.txt")

    def run(stage: SessionStage) -> None:
        left = deadline - time.monotonic()
        text = f"== {stage.name}: no time left"
        if left > 1.0:
            text = run_stage(stage, folder, min(stage.seconds, left))
        summary.add_stage(text)

    with ThreadPoolExecutor(_TESTS_AT_ONCE) as pool:
        for _ in pool.map(run, [stage for stage in stages if not stage.is_alone]):
            """An error of the harness is raised here."""
    for stage in stages:
        if stage.is_alone:
            run(stage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(stage.name for stage in STAGES))
    parser.add_argument("--seconds", type=float, default=480.0, help="for all stages together")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.stages.split(",")
    if CudaDriver(0).count_devices() < 2:
        names = [name for name in names if not name.endswith(_ONE_GPU)]
    stages = [stage for stage in STAGES if stage.name in names]
    run_stages(stages, given.out, given.seconds)


if __name__ == "__main__":
    main()
