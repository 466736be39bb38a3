"""Forked processes must look like started ones to whoever starts, watches and ends them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkedProcess, ForkServer

PROGRAM = "tests.unit.helpers.forked_program"
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(preloaded=["json", "baton.process.startup"])
    yield server
    server.close()


def start_program(
    server: ForkServer, log: Path, end: str, *, module: str = PROGRAM, open_files: int = 0
) -> ForkedProcess:
    with log.open("wb") as file:
        return server.start_process(module, {"END": end}, file.fileno(), open_files=open_files)


def read_output(log: Path) -> dict[str, Any]:
    """What the program found; waits until it has printed it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (text := log.read_text()).endswith("\n"):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(text)
    return found


def test_forked_process_has_its_own_environment_and_exit_code(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    process = start_program(server, tmp_path / "log", "3", open_files=64)
    assert process.wait(TIMEOUT_SECONDS) == process.poll() == process.returncode == 3
    found = read_output(tmp_path / "log")
    assert found["arguments"] == []
    assert found["folder"] == str(tmp_path)
    assert found["environ"].keys() - {"LC_CTYPE"} == {"END", "BATON_SUPERVISOR_PID"}
    assert found["is_session_leader"]
    assert found["open_files"] == 64
    assert found["started_at"] > before, "its start-up begins at its fork, not with the server"
    assert not Path(f"/proc/{process.pid}").exists()


def test_running_process_is_stopped_continued_and_ended_by_signals(
    server: ForkServer, tmp_path: Path
) -> None:
    processes = [start_program(server, tmp_path / str(number), "wait") for number in range(2)]
    for number in range(2):
        read_output(tmp_path / str(number))
    frozen, other = processes
    os.kill(frozen.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        frozen.wait(0.05)
    assert frozen.poll() is None
    other.kill()
    assert other.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
    assert frozen.poll() is None
    frozen.terminate()
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(TIMEOUT_SECONDS) == -signal.SIGTERM
    frozen.kill()  # of a process that has ended: nothing happens


def test_threads_and_exit_handlers_are_awaited(server: ForkServer, tmp_path: Path) -> None:
    process = start_program(server, tmp_path / "log", "late")
    assert process.wait(TIMEOUT_SECONDS) == 1
    _, *last_lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(last_lines) == ["exit handler", "reason", "thread"]


def test_failure_to_run_is_written_to_the_log(server: ForkServer, tmp_path: Path) -> None:
    process = start_program(server, tmp_path / "log", "0", module="tests.no_such_module")
    assert process.wait(TIMEOUT_SECONDS) == 1
    assert "No module named tests.no_such_module" in (tmp_path / "log").read_text()


def test_ended_server_is_reported(tmp_path: Path) -> None:
    server = ForkServer(preloaded=["tests.no_such_module"])
    with pytest.raises((RuntimeError, OSError)):
        start_program(server, tmp_path / "log", "0")
    server.close()
