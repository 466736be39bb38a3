"""A pool and its users as processes that are killed, stopped, resumed and terminated.

A seed decides when and in which order. A process that was killed is started again."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Iterator
from random import Random

from baton.shared_memory import segment as segments
from tests.pool.fake_coordinator import FakePoolCoordinator
from tests.pool.harness import ROOT, PoolProcess, wait_until

USER_COUNT = 4
FAULTS = (
    "kill user",
    "stop user",
    "kill pool",
    "stop pool",
    "end user",
    "end pool",
    "kill stopped user",
)
STOPPED_SECONDS = (0.02, 0.6)  # seconds that a process is stopped, least and most
START_TIMEOUT_SECONDS = (
    60.0  # seconds that a process may take to start, on a machine with other work
)
EXIT_TIMEOUT_SECONDS = 60.0


class PoolUserProcess:
    """A user of the pool in a process of its own; `seed` decides what it does."""

    def __init__(self, run: "PoolFaultRun", number: int, seed: int) -> None:
        self._run = run
        self._arguments = (run.pool.address, str(run.pool.folder), f"user-{number}", str(seed))
        self._listening: asyncio.Task[None] | None = None
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.soak.pool_user", *self._arguments),
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
                "GRPC_VERBOSITY": "ERROR",
            },
            stdin=PIPE,
            stdout=PIPE,
        )
        self._listening = asyncio.create_task(self._read_messages(self._process))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        assert await self._wait_exit() == -signal.SIGKILL

    async def shut_down(self) -> None:
        """End every process in an orderly way."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(EXIT_TIMEOUT_SECONDS):
            assert await self._wait_exit() == 0

    async def _wait_exit(self) -> int:
        assert self._process is not None
        assert self._listening is not None
        await self._listening
        return await self._process.wait()

    async def _read_messages(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.endswith(b"\n"):  # else it was killed over it
                self._run.on_message(json.loads(line))
        if await process.wait() not in (0, -signal.SIGKILL):
            self._run.errors.append(f"{self._arguments[2]} ended with {process.returncode}")


class PoolFaultRun:
    """A run with `each` operations between two faults, on the average."""

    def __init__(
        self, pool: PoolProcess, registrar: FakePoolCoordinator, seed: int, each: int
    ) -> None:
        self.pool = pool
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.rejoin_seconds: list[
            float
        ] = []  # seconds from a pool's start until it has joined again
        self._registrar = registrar
        self._random = Random(seed)
        self._operations_per_fault = each
        self._faults = self._draw_faults()
        self._users = [
            PoolUserProcess(self, number, seed * USER_COUNT + number)
            for number in range(USER_COUNT)
        ]
        self._waking: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()

    def on_message(self, said: dict[str, object]) -> None:
        for what, count in said.items():
            if what == "wrong":
                self.errors.append(str(count))
            elif what != "over":
                assert isinstance(count, int)
                self.counts[what] += count
        self._progress.set()

    async def run_operations(self, operations: int) -> None:
        """Run the operations. Afterwards every user has ended without an error, and nothing is
        held."""
        await asyncio.gather(*(user.start() for user in self._users))
        at = 0
        while at < operations and not self.errors:
            at += self._random.randrange(
                self._operations_per_fault // 2, self._operations_per_fault * 3 // 2
            )
            await self._wait_operations(min(at, operations))
            if at < operations:
                await self._inject_fault(next(self._faults))
        await asyncio.gather(*self._waking)
        await self._check_ledger()
        await asyncio.gather(*(user.shut_down() for user in self._users))
        if not self.errors:
            await self._registrar.wait_for_ledger()

    async def kill_all(self) -> None:
        """Kill every process that is left after a failure."""
        for user in self._users:
            user.send_signal(signal.SIGKILL)
        segments.remove_stale_segments(self.pool.folder)

    # inside

    async def _wait_operations(self, operations: int) -> None:
        async with asyncio.timeout(max(60.0, self._operations_per_fault * 0.2)):
            while self.counts["operations"] < operations and not self.errors:
                self._progress.clear()
                await self._progress.wait()

    def _draw_faults(self) -> Iterator[str]:
        """Draw faults so that every kind occurs once before one occurs again."""
        while True:
            yield from self._random.sample(FAULTS, len(FAULTS))

    async def _inject_fault(self, fault: str) -> None:
        self.counts[fault] += 1
        user = self._random.choice(self._users)
        match fault:
            case "kill user":
                await user.kill()
                await user.start()
            case "stop user":
                user.send_signal(signal.SIGSTOP)
                self._resume_later(user)
            case "kill stopped user":
                user.send_signal(signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(*STOPPED_SECONDS))
                await user.kill()
                await user.start()
            case "end user":
                user.send_signal(signal.SIGCONT)
                await user.shut_down()
                await user.start()
            case "kill pool":
                self.pool.kill()
                await self._restart_pool()
            case "end pool":
                await self._check_ledger()
                self.pool.process.terminate()
                assert await asyncio.to_thread(self.pool.process.wait, EXIT_TIMEOUT_SECONDS) == 0
                await self._restart_pool()
            case "stop pool":
                self.pool.signal(signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(*STOPPED_SECONDS))
                self.pool.signal(signal.SIGCONT)
                await self._check_ledger()

    def _resume_later(self, user: PoolUserProcess) -> None:
        """Resume the process later; meanwhile other faults occur while it is stopped."""

        async def wake(after: float) -> None:
            await asyncio.sleep(after)
            user.send_signal(signal.SIGCONT)

        task = asyncio.create_task(wake(self._random.uniform(*STOPPED_SECONDS)))
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    async def _restart_pool(self) -> None:
        await wait_until("the pool's end is heard", lambda: not self._registrar.is_joined)
        began = time.monotonic()
        self.pool.start()
        await wait_until("joined", lambda: self._registrar.is_joined, START_TIMEOUT_SECONDS)
        self.rejoin_seconds.append(time.monotonic() - began)

    async def _check_ledger(self) -> None:
        await wait_until("joined", lambda: self._registrar.is_joined, START_TIMEOUT_SECONDS)
        await self._registrar.query_ledger()
        self.counts["ledgers"] += 1
