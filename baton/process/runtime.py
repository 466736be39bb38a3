"""Runs the event loop of a process, and handles its signals, shutdown and exit codes."""

import asyncio
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvloop

from baton.errors import BatonError, ConfigError
from baton.process import liveness, log, log_capture

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
# Seconds after which a thread gives Python's lock to another, so that the event loop and the thread
# of the transfer plane wait little.
_SWITCH_INTERVAL = 0.0002
# The same where a GPU computes: a thread gives the lock up at each call of its driver, and would
# wait this long to get it back.
_GPU_SWITCH_INTERVAL = 0.00005
_FINAL_FLUSH_SECONDS = 0.2  # for the last log lines after a second signal


def run_event_loop(
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    longest_stop: float | None = None,
    structured: bool = False,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> int:
    """Run the coroutine `main(stop)` on a new event loop. Returns the process's exit code.

    SIGTERM and SIGINT set `stop`; a second signal ends the process at once. A ConfigError becomes
    one line on standard error and exit code 2, any other BatonError exit code 1. With `structured`
    that line is a log line instead of plain text. A process that still runs `longest_stop` seconds
    after the signal ends with exit code 1 and the stacks of its threads on standard error.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()
    code = EXIT_OK
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_run_with_signals(main, longest_stop))
    except* ConfigError as group:
        code = _report_error(group, EXIT_USAGE, structured=structured)
    except* BatonError as group:
        code = _report_error(group, EXIT_FAILURE, structured=structured)
    return code


async def _run_with_signals(
    main: Callable[[asyncio.Event], Awaitable[None]], longest_stop: float | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_capture.on_loop_error)
    pipe = liveness.consume_liveness_fd()
    signs = None if pipe is None else asyncio.create_task(liveness.send_liveness_signals(pipe))

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.flush_log(_FINAL_FLUSH_SECONDS)
            os._exit(128 + number)
        log.get_logger("runtime").info("stopping", signal=signal.Signals(number).name)
        if longest_stop is not None:
            faulthandler.dump_traceback_later(longest_stop, exit=True)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await main(stop)
    finally:
        if signs is not None:
            signs.cancel()


def _report_error(error: BaseException, code: int, *, structured: bool) -> int:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if structured:
        log.log_fatal_error(str(error))
    else:
        log.write_plain_line(f"error: {error}")
    log.flush_log()
    return code


def prepare_to_serve(*, uses_gpu: bool = False) -> None:
    """Call this when start-up has ended.

    The garbage collector never looks at what was allocated up to now: most of it lives as long as
    the process, and a full collection would hold all threads for tens of milliseconds. Threads that
    call the driver of a GPU wait less for Python's lock.
    """
    gc.collect()
    gc.freeze()
    if uses_gpu:
        sys.setswitchinterval(_GPU_SWITCH_INTERVAL)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage meanwhile, and never look at what was allocated afterwards.

    Large imports allocate many objects that live as long as the process. The collector would visit
    them several times during the import, and again in every full collection. Garbage in reference
    cycles that is there at the end is never freed either, so this is for the start of processes of
    Baton, and not for a library in a user's process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def exit_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies.

    `parent` is the process id of the supervisor that started it. So a supervisor that is killed
    leaves no processes behind.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def disable_core_dumps() -> None:
    """Forbid core files of this process, and that other processes of the user trace or read it.

    Its memory holds prompts and keys. A program that it starts inherits the limit on core files,
    but may be traced unless it calls this function, too.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
