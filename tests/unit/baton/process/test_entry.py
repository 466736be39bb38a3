"""Limits and core dumps of a process that `run_process` starts."""

import os
import subprocess
import sys

import pytest

_PROCESS = """
import asyncio, ctypes, os, resource, sys
from baton.config.resolve import resolve_config
from baton.process.entry import run_process

async def main(config, stop):
    dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE
    core, files = resource.RLIMIT_CORE, resource.RLIMIT_NOFILE
    print(resource.getrlimit(core)[0], dumpable, resource.getrlimit(files)[0])
    print(len(os.listdir("/proc/self/fd")) > 0)

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (min(hard, 4096) if hard >= 0 else 4096, hard))
sys.exit(run_process(lambda: resolve_config({}), main))
"""


def run(**settings: str) -> list[str]:
    environ = {**os.environ, **settings}
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_process_leaves_no_core_and_may_open_what_the_hard_limit_allows() -> None:
    assert run() == ["0", "0", "300", "True"]


def test_core_dumps_can_be_allowed() -> None:
    core, dumpable, files, _ = run(BATON_CORE_DUMPS="true")
    assert (dumpable, files) == ("1", "300")
    assert core != "0" or _no_cores_here()


def _no_cores_here() -> bool:
    resource = pytest.importorskip("resource")
    return bool(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0)
