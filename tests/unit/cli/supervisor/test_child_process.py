"""One child process of a supervisor, without a cluster."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.supervisor.child_output import LineRelay
from baton.cli.supervisor.child_process import ChildProcess
from baton.cli.supervisor.child_specs import ChildSpec
from tests.unit.cli.supervisor.fake_children import wait_until

pytestmark = pytest.mark.slow

# It starts a process that keeps its output open, and ends without it.
PROGRAM = """
import os, subprocess
child = subprocess.Popen(["sleep", "600"])
with open("sleepers", "a") as file:
    file.write(f"{child.pid}\\n")
os._exit(1)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    yield "program"
    for pid in Path("sleepers").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


async def test_the_end_of_a_child_is_seen_while_its_output_is_still_open(program: str) -> None:
    notices: list[str] = []
    spec = ChildSpec("node", program, dict(os.environ))
    child = ChildProcess(spec, LineRelay(lambda *_: None), notices.append)
    child.is_starting = False
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(child.run())
        await wait_until(lambda: len(notices) >= 2)
        await child.stop(10.0)
    assert notices[0].startswith("node ended with exit code 1")
    assert not any("killing" in notice for notice in notices)
