"""A child process that is restarted until it is told to stop."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from io import FileIO
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
_EXIT_NOT_STARTED = 126  # as in shells: the command cannot be run
_DRAIN_OUTPUT_TIMEOUT = 1.0  # seconds to copy what a child wrote before it ended
_READ_BYTES = 1 << 16
_PROC = Path("/proc")


class ChildProcess:
    """`run()` starts the process again and again until `stop()`. Both run on one event loop."""

    def __init__(self, spec: ChildSpec, output: ChildOutput, notify: Callable[[str], None]) -> None:
        self.spec = spec
        self._output = output
        self._notify = notify
        self._backoff = RestartBackoff()
        self._frozen_watch = FrozenWatch()
        self._liveness_watch = LivenessWatch()
        self._aborted_pid: int | None = None  # the process that was aborted as unresponsive
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        # Until the whole cluster has been ready once. A child that cannot start then ends `up`.
        self.is_starting = True

    @property
    def pid(self) -> int | None:
        """The pid of the running process, or None between two runs."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep the process running until `stop()`.

        Raises ConfigError or NodeFailed when it cannot start.
        """
        try:
            while not self._stopping.is_set():
                started = clock.monotonic_clock()
                code = await self._run_once()
                if not self._stopping.is_set():
                    await self._handle_exit(code, clock.monotonic_clock() - started)
        finally:
            self._ended.set()

    async def stop(self, timeout_seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_seconds`. Returns when the process has ended."""
        self._stopping.set()
        self._send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()
        except TimeoutError:
            self._notify(
                f"{self.spec.name} did not end within {timeout_seconds:g} s of SIGTERM: killing it"
            )
            self._send_signal(signal.SIGKILL)
            await self._ended.wait()

    def kill_if_frozen(self, now: float) -> None:
        """Kill the process if it has been stopped (SIGSTOP, tracer) for FROZEN_KILL_SECONDS.

        A frozen process holds blocks that cannot be reused until it is proven to be gone.
        """
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

    def abort_if_unresponsive(self, max_silent_checks: float, interval_seconds: float) -> None:
        """End the process if it shows no sign of life for `max_silent_checks` checks.

        Call it every `interval_seconds`, which is at least the period of the signs of life. SIGABRT
        makes the process write where its threads are. If it has not ended by the next check,
        SIGKILL follows.
        """
        state = self._process_state()
        if self._process is None or not state:
            return
        pid = self._process.pid
        if not self._liveness_watch.check_unresponsive(pid, state, max_silent_checks):
            return
        if self._aborted_pid == pid:
            self._send_signal(signal.SIGKILL)
            return
        self._aborted_pid = pid
        silence = f"{max_silent_checks * interval_seconds:g} s (--liveness-timeout)"
        self._notify(f"{self.spec.name} has been unresponsive for {silence}: ending it")
        self._send_signal(signal.SIGABRT)

    def _process_state(self) -> str:
        """Return the state letter of the process, empty if there is none or it has ended."""
        if self._process is None:
            return ""
        try:
            return parse_process_state((_PROC / str(self._process.pid) / "stat").read_text())
        except OSError:
            # The process has ended, or /proc is mounted with hidepid, which hides processes that
            # leave no core file.
            return _state_from_waitid(self._process.pid)

    async def _run_once(self) -> int:
        """Run the process once and return its exit code, negative for a signal."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            try:
                signs, signs_sender = _open_pipe(opened, os.O_NONBLOCK)
                output, output_sender = _open_pipe(opened)
                stream = asyncio.StreamReader()
                transport, _ = await loop.connect_read_pipe(
                    lambda: asyncio.StreamReaderProtocol(stream), output
                )
                opened.callback(transport.close)
                process = await self._spawn(signs_sender.fileno(), output_sender.fileno())
            except (OSError, RuntimeError) as error:  # no memory, descriptors or threads: temporary
                reason = error.strerror if isinstance(error, OSError) else error
                self._notify(f"{self.spec.name} cannot be started: {reason}")
                return _EXIT_NOT_STARTED
            signs_sender.close()
            output_sender.close()
            loop.add_reader(signs, self._read_liveness, signs.fileno(), process.pid)
            opened.callback(loop.remove_reader, signs)
            return await self._wait_for_exit(process, stream)

    async def _wait_for_exit(
        self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader
    ) -> int:
        """Forward what `process` writes to `stream` until it exits. Returns its exit code."""
        self._process = process
        if self._stopping.is_set():
            self._send_signal(signal.SIGTERM)
        copying = asyncio.create_task(self._copy_output(stream))
        try:
            code = await process.wait()
            await asyncio.wait({copying}, timeout=_DRAIN_OUTPUT_TIMEOUT)
            return code
        except asyncio.CancelledError:
            self._send_signal(signal.SIGKILL)
            await process.wait()
            raise
        finally:
            copying.cancel()
            self._process = None

    async def _spawn(self, signs_fd: int, output_fd: int) -> asyncio.subprocess.Process:
        """Start the process, with the ends to write of its pipes.

        Raises OSError, and RuntimeError if asyncio cannot start a thread that waits for its exit.
        With `stdout=PIPE`, asyncio reports an exit only when the pipe is closed, and processes that
        the child has started may keep it open.
        """
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.spec.module,
            env={**self.spec.environ, liveness.LIVENESS_FD_VARIABLE: str(signs_fd)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output_fd,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(signs_fd,),
            # The supervisor handles Ctrl-C: the coordinator ends first. Not a session for each:
            # Linux divides the CPU between sessions, whatever the priorities of their threads.
            process_group=0,
        )

    def _read_liveness(self, receiver: int, pid: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(receiver, _READ_BYTES):
                self._liveness_watch.record_sign_of_life(pid)
            else:  # the child has closed its end of the pipe: it is exiting
                asyncio.get_running_loop().remove_reader(receiver)

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        """Copy the output of one run.

        After an error it still reads the output, so that the child never waits for a reader.
        """
        try:
            await self._output.copy_lines(self.spec.name, stream)
        except Exception as error:
            self._notify(
                f"the output of {self.spec.name} is not shown any more ({type(error).__name__})"
            )
            while await stream.read(_READ_BYTES):
                pass

    async def _handle_exit(self, code: int, run_seconds: float) -> None:
        """Report an unexpected exit and wait before the restart; raise if a restart cannot help."""
        name = self.spec.name
        delay = self._backoff.next_delay(run_seconds)
        message = find_failure_message(self._output.get_last_lines(name))
        has_given_up = self.is_starting and self._backoff.consecutive_failures >= MAX_FAILED_STARTS
        if self.spec.is_optional and (has_given_up or (self.is_starting and code == _EXIT_CONFIG)):
            self._notify(f"{name} failed, continuing without it ({message})")
            self._stopping.set()
            return
        if self.is_starting and code == _EXIT_CONFIG:
            raise ConfigError(message)
        if has_given_up:
            raise NodeFailed(
                f"{name} failed {MAX_FAILED_STARTS} times ({_describe_exit(code)}) "
                f"before it was ready: {message}"
            )
        ending = f"{_describe_exit(code)} ({message})" if code > 0 else _describe_exit(code)
        self._notify(f"{name} {ending}: starting it again in {delay:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _open_pipe(opened: contextlib.ExitStack, flags: int = 0) -> tuple[FileIO, FileIO]:
    """Return the read and the write end of a pipe that `opened` closes. Raises OSError."""
    reading, writing = os.pipe2(os.O_CLOEXEC | flags)
    return opened.enter_context(FileIO(reading)), opened.enter_context(FileIO(writing, "w"))


def _state_from_waitid(pid: int) -> str:
    """Ask the kernel for the state of a child: T if stopped, R if not, empty if there is none.

    The exit status is left for the later wait.
    """
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
