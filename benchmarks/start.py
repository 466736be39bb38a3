"""`start`: a cold start, from the command `baton up` to the first token of the first request.

Each process divides its start into phases and logs them. The critical path is `baton up` until it
starts the other processes, then the node that joins last, then the warm-up request and the first
request. What the path has beside interpreters and imports is Baton's own part. The files of models
and libraries are in the page cache, unless this is the first start since the machine was booted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from rich.console import Console

from baton.cli.common.default_model import find_default_model
from baton.errors import NodeFailed
from baton.process.startup import STARTUP_EVENT
from benchmarks.figures.report import ResultRow, make_row, print_rows

HELP = "the parts of a cold start, up to the first token"
_SUPERVISOR = "up"
_IMPORT_PHASES = ("imports", "engine_imports")  # the interpreter is part of the first
_NODE_PHASE = "engine_imports"  # a phase that only nodes have
_PROMPT = "def read_lines(path):"
_REQUEST_TIMEOUT = 120.0  # seconds
_STOP_TIMEOUT = 60.0  # seconds

Phases = Mapping[str, float]  # seconds of each phase of a process


@dataclass(frozen=True, slots=True)
class ColdStart:
    """One start: when the cluster was ready, and what its processes did until then."""

    ready_seconds: float  # from the start of the command
    first_token_seconds: float
    phases: Mapping[str, Phases]  # by process

    @property
    def imports_seconds(self) -> float:
        """Interpreters and imports on the critical path."""
        path = self.phases[_SUPERVISOR], self.phases[self.last_node]
        return sum(process.get(phase, 0.0) for process in path for phase in _IMPORT_PHASES)

    @property
    def own_seconds(self) -> float:
        """Everything else until the first token."""
        return self.first_token_seconds - self.imports_seconds

    @property
    def last_node(self) -> str:
        """The node that took longest to start."""
        nodes = {name: sum(one.values()) for name, one in self.phases.items() if _NODE_PHASE in one}
        return max(nodes, key=nodes.__getitem__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="folder of a model; default: the demo model")
    parser.add_argument("--rounds", type=int, default=3, help="starts, of which the median counts")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds to the first token")
    parser.add_argument("--own-limit", type=float, default=1.0, help="seconds of Baton's own part")


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    model = Path(options.model or find_default_model())
    starts = [start_cluster(model) for _ in range(max(1, options.rounds))]
    starts.sort(key=lambda one: one.first_token_seconds)
    median = starts[len(starts) // 2]
    rows = make_rows(median, command, options.limit, options.own_limit)
    print_rows(console, f"start: {model.name}, the median of {len(starts)} starts", rows)
    return rows


def make_rows(start: ColdStart, command: str, limit: float, own_limit: float) -> list[ResultRow]:
    rows = [
        make_row(
            f"start/{process}/{phase}",
            seconds,
            "s",
            command,
            note="last node" if process == start.last_node else "",
        )
        for process, phases in start.phases.items()
        for phase, seconds in phases.items()
    ]
    last = sum(start.phases[start.last_node].values())
    begun = sum(start.phases[_SUPERVISOR].values())
    joining = start.ready_seconds - begun - last
    return [
        *rows,
        make_row("start/join_and_warm_up_request", joining, "s", command),
        make_row("start/ready", start.ready_seconds, "s", command),
        make_row("start/first_token", start.first_token_seconds, "s", command, limit=limit),
        make_row("start/interpreters_and_imports", start.imports_seconds, "s", command),
        make_row("start/own_part", start.own_seconds, "s", command, limit=own_limit),
    ]


def start_cluster(model: Path) -> ColdStart:
    """Start a cluster once, send a request, and stop it. Raises NodeFailed if it does not start."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log_file = Path(folder, "lines")
        started = time.monotonic()
        process = _spawn_supervisor(model, folder, log_file)
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline()
            ready = time.monotonic() - started
            if not announcement:
                raise NodeFailed(f"the cluster did not start: {_last_line(log_file)}")
            wait_for_first_token(json.loads(announcement)["http"])
            first_token = time.monotonic() - started
        finally:
            _stop_supervisor(process)
        return ColdStart(ready, first_token, read_phases(log_file.read_text().split("\n")))


def _spawn_supervisor(model: Path, folder: str, log_file: Path) -> subprocess.Popen[bytes]:
    arguments = ["--model", str(model), "--log-format", "json", "--state-dir", folder]
    ports = ["--port", "0", "--grpc-port", "0", "--admin-port", "0"]
    with log_file.open("wb") as lines:
        return subprocess.Popen(
            [sys.executable, "-m", "baton.cli", "up", *arguments, *ports],
            stdout=subprocess.PIPE,
            stderr=lines,
        )


def _stop_supervisor(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for_first_token(url: str) -> None:
    """Send a request, and return when its first token has come."""
    body = {"prompt": _PROMPT, "max_tokens": 4, "stream": True}
    with httpx2.stream("POST", f"{url}/completions", json=body, timeout=_REQUEST_TIMEOUT) as answer:
        answer.raise_for_status()
        next(answer.iter_lines())


def read_phases(lines: Iterable[str]) -> dict[str, Phases]:
    """Return the phases that the processes have logged, by process."""
    phases: dict[str, Phases] = {}
    for line in lines:
        if STARTUP_EVENT in line:
            fields = json.loads(line)
            phases[fields["node"]] = {
                name.removesuffix("_seconds"): value
                for name, value in fields.items()
                if name.endswith("_seconds")
            }
    return phases


def _last_line(path: Path) -> str:
    written: Sequence[str] = path.read_text().split("\n")
    return next((line for line in reversed(written) if line), "it said nothing")
