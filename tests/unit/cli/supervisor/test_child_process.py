"""How `baton up` sees that one of its processes has ended."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.supervisor.child_output import LineRelay
from baton.cli.supervisor.child_process import ChildProcess
from baton.cli.supervisor.child_specs import ChildSpec
from tests.unit.cli.supervisor.fake_children import any_alive, wait_until

pytestmark = pytest.mark.slow

# It starts a process that keeps its output open, and ends without it.
PROGRAM = """
import os, subprocess
child = subprocess.Popen(["sleep", "600"])
with open("sleepers", "a") as file:
    file.write(f"{child.pid}\\n")
os._exit(1)
"""


def make_child(module: str, notices: list[str]) -> ChildProcess:
    spec = ChildSpec("node", module, dict(os.environ))
    child = ChildProcess(spec, LineRelay(lambda *_: None), notices.append)
    child.is_starting = False
    return child


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    yield "program"
    for pid in Path("sleepers").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


async def test_the_end_of_a_child_is_seen_while_its_output_is_still_open(program: str) -> None:
    notices: list[str] = []
    child = make_child(program, notices)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(child.run())
        await wait_until(lambda: len(notices) >= 2)
        await child.stop(10.0)
    assert notices[0].startswith("node ended with exit code 1")
    assert not any("killing" in notice for notice in notices)


async def test_a_child_that_cannot_be_started_is_tried_again_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def raise_runtime_error(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", raise_runtime_error)
    notices: list[str] = []
    child = make_child("unused", notices)
    descriptors = os.listdir("/proc/self/fd")
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(child.run())
        await wait_until(lambda: len(notices) >= 4)
        await child.stop(10.0)
    assert notices[0] == "node cannot be started: can't start new thread"
    assert notices[2] == notices[0]
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


async def test_a_run_that_is_cancelled_leaves_no_process_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # It outlives the time limit of the test, so that only the cancellation can end it.
    (tmp_path / "waiting.py").write_text("import time\ntime.sleep(600)\n")
    child = make_child("waiting", [])
    descriptors = os.listdir("/proc/self/fd")
    async with asyncio.timeout(60):
        running = asyncio.create_task(child.run())
        await wait_until(lambda: child.pid is not None)
        pid = child.pid
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled()
    assert pid is not None
    assert not any_alive([pid])
    await asyncio.sleep(0)  # asyncio closes its pipes
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
