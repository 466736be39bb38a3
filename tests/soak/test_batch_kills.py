"""A batch that is killed at random moments answers every line exactly once.

`make test` kills it a few times, `make batch-kills` twenty times.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.offline.batch_files import (
    assert_each_is_answered_once,
    request_line,
    write_lines,
)

ANSWER_BYTES = 420  # of a line of the output, about
_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0


@pytest.mark.slow
def test_every_line_is_answered_once_through_kills(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = int(request.config.getoption("--batch-kills"))
    draw = random.Random(request.config.getoption("--soak-seed"))
    names = [f"id-{number}" for number in range(60 * (kills + 1))]
    source = write_lines(tmp_path / "in.jsonl", map(request_line, names))
    batch = Batch(source, tmp_path / "out.jsonl", tmp_path / "segments")
    moments = []
    for _ in range(kills):
        # One in four before the first answer: while files are read or the engine starts.
        answers = 0 if draw.random() < 0.25 else draw.randint(1, 59)
        moments.append(batch.run_and_kill(answers * ANSWER_BYTES, draw.uniform(0.0, 0.05)))
    assert batch.run() == 0
    assert_each_is_answered_once(batch.output, names)
    sys.stdout.write(f"killed with so many bytes written: {moments}\n")
    assert sorted(moments) == moments, "no answer was lost"
    assert not list(batch.segments.glob("baton-*")), "what killed runs left is removed"


class Batch:
    """`baton run-batch` with a paced engine, as a process."""

    def __init__(self, source: Path, output: Path, segments: Path) -> None:
        self.output = output
        self.segments = segments
        segments.mkdir()
        self._command = [sys.executable, "-m", "offline.batch", str(source), str(output)]
        self._command += ["--engine", "paced", "--segment-dir", str(segments)]
        self._command += ["--kv-memory", "8MiB", "--max-in-flight", "4", "--paced-step-ms", "5"]

    def run(self) -> int:
        """Run it to its end; returns the exit code."""
        return subprocess.run(self._command, check=False, timeout=_PATIENCE_SECONDS).returncode

    def run_and_kill(self, growth: int, delay: float) -> int:
        """Kill it `delay` seconds after its output has grown; returns the size of the output."""
        wanted = self._size() + growth
        with subprocess.Popen(self._command) as process:
            self._wait_for_size(process, wanted)
            _wait(process, delay)
            process.kill()
        assert process.returncode == -9, "it ended before it was killed"
        return self._size()

    def _wait_for_size(self, process: "subprocess.Popen[bytes]", wanted: int) -> None:
        for _ in range(round(_PATIENCE_SECONDS / _LOOK_SECONDS)):
            if self._size() >= wanted or _wait(process, _LOOK_SECONDS):
                return
        raise AssertionError(f"{self._size()} bytes were written, and {wanted} never")

    def _size(self) -> int:
        return self.output.stat().st_size if self.output.exists() else 0


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
