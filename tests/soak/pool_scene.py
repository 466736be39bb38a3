"""A pool and its users as processes, and what befalls them: killed, stopped and woken, told to end, at moments and in
an order that a seed decides. Whoever is killed is started again."""

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

from baton import segment as segments
from tests.pool.registrar import Registrar
from tests.pool.rig import ROOT, PoolProcess, until

USERS = 4
FAULTS = ("kill user", "stop user", "kill pool", "stop pool", "end user", "end pool", "kill stopped user")
STOPPED = (0.02, 0.6)  # seconds that a process is stopped, least and most
START = 60.0  # seconds that a process may take to start, on a machine with other work
END = 60.0


class UserProcess:
    """`seed` decides what it does."""

    def __init__(self, scene: "PoolScene", number: int, seed: int) -> None:
        self._scene = scene
        self._arguments = (scene.pool.address, str(scene.pool.folder), f"user-{number}", str(seed))
        self._listening: asyncio.Task[None] | None = None
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.soak.pool_user", *self._arguments),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "GRPC_VERBOSITY": "ERROR"},
            stdin=PIPE,
            stdout=PIPE,
        )
        self._listening = asyncio.create_task(self._listen(self._process))

    def signal(self, number: signal.Signals) -> None:
        """A no-op for one that is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert await self._gone() == -signal.SIGKILL

    async def end(self) -> None:
        """Well."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(END):
            assert await self._gone() == 0

    async def _gone(self) -> int:
        assert self._process is not None
        assert self._listening is not None
        await self._listening
        return await self._process.wait()

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.endswith(b"\n"):  # else it was killed over it
                self._scene.heard(json.loads(line))
        if await process.wait() not in (0, -signal.SIGKILL):
            self._scene.wrong.append(f"{self._arguments[2]} ended with {process.returncode}")


class PoolScene:
    """`each`: operations between two faults, on the average."""

    def __init__(self, pool: PoolProcess, registrar: Registrar, seed: int, each: int) -> None:
        self.pool = pool
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rejoined: list[float] = []  # seconds from a pool's start until it has joined again
        self._registrar = registrar
        self._random = Random(seed)
        self._each = each
        self._faults = self._deck()
        self._users = [UserProcess(self, number, seed * USERS + number) for number in range(USERS)]
        self._waking: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()

    def heard(self, said: dict[str, object]) -> None:
        for what, count in said.items():
            if what == "wrong":
                self.wrong.append(str(count))
            elif what != "over":
                assert isinstance(count, int)
                self.did[what] += count
        self._progress.set()

    async def play(self, operations: int) -> None:
        """Afterwards every process but the pool's has ended well, and nothing is held."""
        await asyncio.gather(*(user.start() for user in self._users))
        at = 0
        while at < operations and not self.wrong:
            at += self._random.randrange(self._each // 2, self._each * 3 // 2)
            await self._reach(min(at, operations))
            if at < operations:
                await self._strike(next(self._faults))
        await asyncio.gather(*self._waking)
        await self._books_balance()
        await asyncio.gather(*(user.end() for user in self._users))
        if not self.wrong:
            await self._registrar.settled()

    async def kill_all(self) -> None:
        """Whatever is left after a failure."""
        for user in self._users:
            user.signal(signal.SIGKILL)
        segments.sweep(self.pool.folder)

    # inside

    async def _reach(self, operations: int) -> None:
        async with asyncio.timeout(max(60.0, self._each * 0.2)):
            while self.did["operations"] < operations and not self.wrong:
                self._progress.clear()
                await self._progress.wait()

    def _deck(self) -> Iterator[str]:
        """Every kind comes before one comes again."""
        while True:
            yield from self._random.sample(FAULTS, len(FAULTS))

    async def _strike(self, fault: str) -> None:
        self.did[fault] += 1
        user = self._random.choice(self._users)
        match fault:
            case "kill user":
                await user.kill()
                await user.start()
            case "stop user":
                user.signal(signal.SIGSTOP)
                self._wake(user)
            case "kill stopped user":
                user.signal(signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(*STOPPED))
                await user.kill()
                await user.start()
            case "end user":
                user.signal(signal.SIGCONT)
                await user.end()
                await user.start()
            case "kill pool":
                self.pool.kill()
                await self._restart()
            case "end pool":
                await self._books_balance()
                self.pool.process.terminate()
                assert await asyncio.to_thread(self.pool.process.wait, END) == 0
                await self._restart()
            case "stop pool":
                self.pool.signal(signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(*STOPPED))
                self.pool.signal(signal.SIGCONT)
                await self._books_balance()

    def _wake(self, user: UserProcess) -> None:
        """Later; what befalls others meanwhile finds it stopped."""

        async def wake(after: float) -> None:
            await asyncio.sleep(after)
            user.signal(signal.SIGCONT)

        task = asyncio.create_task(wake(self._random.uniform(*STOPPED)))
        self._waking.add(task)
        task.add_done_callback(self._waking.discard)

    async def _restart(self) -> None:
        await until("the pool's end is heard", lambda: not self._registrar.joined)
        began = time.monotonic()
        self.pool.start()
        await until("joined", lambda: self._registrar.joined, START)
        self.rejoined.append(time.monotonic() - began)

    async def _books_balance(self) -> None:
        await until("joined", lambda: self._registrar.joined, START)
        await self._registrar.ledger()
        self.did["ledgers"] += 1
