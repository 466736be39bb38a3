import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio

from tests.pool.fake_coordinator import FakePoolCoordinator
from tests.pool.harness import (
    ROOT,
    TIMEOUT_SECONDS,
    PoolNode,
    PoolProcess,
    run_pool_node,
    wait_until,
)


class PoolTestHost:
    """A pool, a coordinator that it is a member of, and nodes of its host."""

    def __init__(self, pool: PoolProcess, registrar: FakePoolCoordinator, folder: Path) -> None:
        self.pool = pool
        self.registrar = registrar
        self.folder = folder
        self._open = AsyncExitStack()

    async def start_node(self, name: str = "decode-0", **changed: Any) -> PoolNode:
        """Start a node, and return when it is attached and the pool is a member."""
        node = await self._open.enter_async_context(
            run_pool_node(self.pool.address, self.folder, name, **changed)
        )
        await node.wait_until_attached()
        await wait_until("joined", lambda: self.registrar.is_joined)
        return node

    async def start_node_process(self, name: str, **environ: str) -> "NodeProcess":
        process = self._open.enter_context(
            NodeProcess(self.pool.address, self.folder, name, environ)
        )
        assert await process.read_reply() == "attached"
        await wait_until("joined", lambda: self.registrar.is_joined)
        return process

    async def reset(self) -> None:
        """Start the pool if it does not run, and end its nodes."""
        if self.pool.process.poll() is not None:
            self.pool.start()
        await self.start_node("warm-up")
        await self._open.aclose()

    async def stop_nodes(self) -> None:
        """End all nodes of the test; nothing is held afterwards."""
        await self._open.aclose()
        for path in self.folder.glob("baton-arena-*"):  # of nodes that were killed
            path.unlink()
        if self.pool.process.poll() is None and self.registrar.is_joined:
            await self.registrar.wait_for_ledger()


class NodeProcess:
    def __init__(self, address: str, folder: Path, name: str, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pool.node_process", address, str(folder), name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._segments = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def send_order(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    async def read_reply(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return json.loads(await asyncio.to_thread(self._process.stdout.readline))

    async def run_order(self, do: str, **arguments: object) -> Any:
        self.send_order(do, **arguments)
        return await self.read_reply()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def wait_until_stopped(self) -> None:
        """Wait until the process has stopped itself."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        await wait_until("stopped", lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_SECONDS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(request: pytest.FixtureRequest) -> AsyncIterator[PoolTestHost]:
    """One pool for a module, with a segment folder of its own; `SETTINGS` of the module are its."""
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    settings = getattr(request.module, "SETTINGS", {})
    try:
        async with FakePoolCoordinator.open() as registrar:
            with PoolProcess(
                folder, coordinator=registrar.address, name="pool-0", **settings
            ) as pool:
                yield PoolTestHost(pool, registrar, folder)
        assert os.listdir(folder) == [], "segments were left behind"
    finally:
        shutil.rmtree(folder)


@pytest_asyncio.fixture(loop_scope="module")
async def host(running: PoolTestHost) -> AsyncIterator[PoolTestHost]:
    """The pool of the module, without nodes. Afterwards nothing may be held."""
    await running.reset()
    yield running
    await running.stop_nodes()
