"""One child process that is kept running until it is told to stop."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from baton import clock
from baton.cli.output import Output, complaint
from baton.cli.plan import ChildSpec
from baton.cli.restarts import FROZEN_FOR, MAX_FAILED_STARTS, FrozenWatch, Restarts, state_of
from baton.errors import ConfigError, NodeFailed

_EXIT_CONFIG = 2
_LAST_LINES_TIMEOUT = 1.0  # seconds to carry what a child wrote before it ended


class Child:
    """`keep()` runs it again and again; `stop()` ends that. Both belong to one event loop."""

    def __init__(self, spec: ChildSpec, output: Output, tell: Callable[[str], None]) -> None:
        self.spec = spec
        self._output = output
        self._tell = tell
        self._restarts = Restarts()
        self._watch = FrozenWatch()
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.starting = True  # until the whole cluster was ready once: a child that cannot start ends `up`

    @property
    def pid(self) -> int | None:
        """Of the running process, None between two runs."""
        return self._process.pid if self._process else None

    async def keep(self) -> None:
        """Run until `stop()`. Raises ConfigError or NodeFailed when it cannot even start."""
        try:
            while not self._stopping.is_set():
                started = clock.steady()
                code = await self._run()
                if not self._stopping.is_set():
                    await self._after(code, clock.steady() - started)
        finally:
            self._ended.set()

    async def stop(self, patience: float) -> None:
        """SIGTERM, and after `patience` seconds SIGKILL. Returns when the process is gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            self._tell(f"{self.spec.name} did not end within {patience:g} s of SIGTERM: killing it")
            self._signal(signal.SIGKILL)
            await self._ended.wait()

    def kill_if_frozen(self, now: float) -> None:
        """A process that has been stopped for long holds blocks that nobody may reuse before it is proven gone."""
        if self._process is None:
            return
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:  # it has just ended
            return
        if self._watch.frozen(self._process.pid, state_of(stat), now):
            self._tell(f"{self.spec.name} has been stopped for {FROZEN_FOR:g} s: killing it")
            self._signal(signal.SIGKILL)

    async def _run(self) -> int:
        """One life of the process; its exit code, negative for a signal."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.spec.module,
            env=self.spec.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output.target(self.spec.name),
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle: the coordinator ends first
        )
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        lines = asyncio.create_task(self._output.follow(self.spec.name, process.stdout))
        try:
            code = await process.wait()
            await asyncio.wait({lines}, timeout=_LAST_LINES_TIMEOUT)
            return code
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            await process.wait()
            raise
        finally:
            lines.cancel()
            self._process = None

    async def _after(self, code: int, ran: float) -> None:
        """Judge a run that nobody asked to end, then wait for the moment of the next."""
        name = self.spec.name
        delay = self._restarts.delay(ran)
        said = complaint(self._output.last_words(name))
        hopeless = self.starting and self._restarts.failures >= MAX_FAILED_STARTS
        if self.spec.optional and (hopeless or code == _EXIT_CONFIG):
            self._tell(f"{name} cannot run: going on without it ({said})")
            self._stopping.set()
            return
        if self.starting and code == _EXIT_CONFIG:
            raise ConfigError(said)
        if hopeless:
            raise NodeFailed(f"{name} failed {MAX_FAILED_STARTS} times ({_ending(code)}) before it was ready: {said}")
        ending = f"{_ending(code)} ({said})" if code > 0 else _ending(code)
        self._tell(f"{name} {ending}: starting it again in {delay:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
