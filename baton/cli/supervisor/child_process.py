"""One child process that is kept running until it is told to stop."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from baton.cli.supervisor.child_output import ChildOutput, find_failure_message
from baton.cli.supervisor.child_specs import ChildSpec
from baton.cli.supervisor.restart_policy import (
    FROZEN_KILL_SECONDS,
    MAX_FAILED_STARTS,
    FrozenWatch,
    LivenessWatch,
    RestartBackoff,
    parse_process_state,
)
from baton.errors import ConfigError, NodeFailed
from baton.process import clock, liveness

_EXIT_CONFIG = 2
_EXIT_NOT_STARTED = 126  # what a shell says of a command that it cannot run
_DRAIN_OUTPUT_TIMEOUT = 1.0  # seconds to carry what a child wrote before it ended
_READ_BYTES = 1 << 16
_PROC = Path("/proc")


class ChildProcess:
    """`keep()` runs it again and again; `stop()` ends that. Both belong to one event loop."""

    def __init__(self, spec: ChildSpec, output: ChildOutput, tell: Callable[[str], None]) -> None:
        self.spec = spec
        self._output = output
        self._notify = tell
        self._backoff = RestartBackoff()
        self._frozen_watch = FrozenWatch()
        self._liveness_watch = LivenessWatch()
        self._aborted_pid: int | None = (
            None  # the pid that was told to end because it showed no sign of life
        )
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.is_starting = (
            True  # until the whole cluster was ready once: a child that cannot start ends `up`
        )

    @property
    def pid(self) -> int | None:
        """Of the running process, None between two runs."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Run until `stop()`. Raises ConfigError or NodeFailed when it cannot even start."""
        try:
            while not self._stopping.is_set():
                started = clock.monotonic_clock()
                code = await self._run_once()
                if not self._stopping.is_set():
                    await self._handle_exit(code, clock.monotonic_clock() - started)
        finally:
            self._ended.set()

    async def stop(self, patience: float) -> None:
        """SIGTERM, and after `patience` seconds SIGKILL. Returns when the process is gone."""
        self._stopping.set()
        self._send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            self._notify(
                f"{self.spec.name} did not end within {patience:g} s of SIGTERM: killing it"
            )
            self._send_signal(signal.SIGKILL)
            await self._ended.wait()

    def kill_if_frozen(self, now: float) -> None:
        """A process that has been stopped for long holds blocks that nobody may reuse before it is
        proven gone."""
        state = self._process_state()
        if (
            self._process is not None
            and state
            and self._frozen_watch.check_frozen(self._process.pid, state, now)
        ):
            self._notify(
                f"{self.spec.name} has been stopped for {FROZEN_KILL_SECONDS:g} s: killing it"
            )
            self._send_signal(signal.SIGKILL)

    def abort_if_unresponsive(self, looks: float, every: float) -> None:
        """To be called every `every` seconds, which is at least the period of a sign of life. A
        process that shows none any more is alive for the kernel only. SIGABRT lets it show where
        its threads are; if that does not end it, the next look does."""
        state = self._process_state()
        if self._process is None or not state:
            return
        pid = self._process.pid
        if not self._liveness_watch.check_unresponsive(pid, state, looks):
            return
        if self._aborted_pid == pid:
            self._send_signal(signal.SIGKILL)
            return
        self._aborted_pid = pid
        silence = f"{looks * every:g} s (--liveness-timeout)"
        self._notify(f"{self.spec.name} has shown no sign of life for {silence}: ending it")
        self._send_signal(signal.SIGABRT)

    def _process_state(self) -> str:
        """The state letter of the process, empty if there is none or it has ended."""
        if self._process is None:
            return ""
        try:
            return parse_process_state((_PROC / str(self._process.pid) / "stat").read_text())
        # it has ended, or /proc is mounted with hidepid and shows no process that leaves no core
        # file
        except OSError:
            return _state_from_waitid(self._process.pid)

    async def _run_once(self) -> int:
        """One life of the process; its exit code, negative for a signal."""
        receiver, sender = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            process = await self._spawn(sender)
        except OSError as error:  # no memory, no descriptors: that passes
            os.close(receiver)
            self._notify(f"{self.spec.name} cannot be started: {error.strerror}")
            return _EXIT_NOT_STARTED
        finally:
            os.close(sender)
        self._process = process
        if self._stopping.is_set():
            self._send_signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        loop.add_reader(receiver, self._read_liveness, receiver, process.pid)
        assert process.stdout is not None
        lines = asyncio.create_task(self._copy_output(process.stdout))
        try:
            code = await process.wait()
            await asyncio.wait({lines}, timeout=_DRAIN_OUTPUT_TIMEOUT)
            return code
        except asyncio.CancelledError:
            self._send_signal(signal.SIGKILL)
            await process.wait()
            raise
        finally:
            lines.cancel()
            loop.remove_reader(receiver)
            os.close(receiver)
            self._process = None

    async def _spawn(self, sender: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.spec.module,
            env={**self.spec.environ, liveness.LIVENESS_FD_VARIABLE: str(sender)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(sender,),
            start_new_session=True,  # Ctrl-C is ours to handle: the coordinator ends first
        )

    def _read_liveness(self, receiver: int, pid: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(receiver, _READ_BYTES):
                self._liveness_watch.record_sign_of_life(pid)
            else:  # it has closed its end: it ends
                asyncio.get_running_loop().remove_reader(receiver)

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        """Carry the lines of one life. Whatever goes wrong with them, the child must not wait for a
        reader."""
        try:
            await self._output.copy_lines(self.spec.name, stream)
        except Exception as error:
            self._notify(
                f"the lines of {self.spec.name} are not shown any more ({type(error).__name__})"
            )
            while await stream.read(_READ_BYTES):
                pass

    async def _handle_exit(self, code: int, ran: float) -> None:
        """Judge a run that nobody asked to end, then wait for the moment of the next."""
        name = self.spec.name
        delay = self._backoff.next_delay(ran)
        said = find_failure_message(self._output.get_last_lines(name))
        hopeless = self.is_starting and self._backoff.consecutive_failures >= MAX_FAILED_STARTS
        if self.spec.is_optional and (hopeless or (self.is_starting and code == _EXIT_CONFIG)):
            self._notify(f"{name} cannot run: going on without it ({said})")
            self._stopping.set()
            return
        if self.is_starting and code == _EXIT_CONFIG:
            raise ConfigError(said)
        if hopeless:
            raise NodeFailed(
                f"{name} failed {MAX_FAILED_STARTS} times ({_describe_exit(code)}) before it was ready: {said}"
            )
        ending = f"{_describe_exit(code)} ({said})" if code > 0 else _describe_exit(code)
        self._notify(f"{name} {ending}: starting it again in {delay:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _state_from_waitid(pid: int) -> str:
    """What the kernel tells the parent of a process: T for a stopped one, R for any other, empty if
    there is none. Its end is left to be waited for."""
    try:
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return "T" if stopped is not None else "R"


def _describe_exit(code: int) -> str:
    return (
        f"ended with exit code {code}"
        if code >= 0
        else f"was ended by {signal.Signals(-code).name}"
    )
