"""How a process of ours starts and stops: uvloop, signals, one task group, exit codes."""

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from baton import log
from baton.errors import BatonError, ConfigError

EXIT_OK, EXIT_BAD, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SWITCH_INTERVAL = 0.001  # seconds: the event loop must not wait long for a thread that holds Python's lock


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main(stop)` on uvloop until it returns. SIGTERM and SIGINT set `stop`; a second one exits at once.

    A ConfigError becomes one line on standard error and exit code 2; any other BatonError, exit code 1.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()
    code = EXIT_OK
    try:
        uvloop.run(_with_signals(main))
    except* ConfigError as group:
        code = _complain(group, EXIT_USAGE)
    except* BatonError as group:
        code = _complain(group, EXIT_BAD)
    return code


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.get("runtime").info("stopping", signal=signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await main(stop)


def _complain(error: BaseException, code: int) -> int:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    sys.stderr.write(f"error: {error}\n")
    return code


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when `parent`, which started it, dies: a supervisor killed outright leaves
    nothing behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)


def forbid_core_dumps() -> None:
    """No core file of this process, and no tracer or reader of its memory among the user's other processes: prompts
    and keys are in there. A program that this process starts may be dumped again."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
