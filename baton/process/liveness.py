"""The liveness signal of a process to its supervisor: its event loop writes bytes to a pipe."""

import asyncio
import contextlib
import os

# The variable with the number of the pipe's descriptor, inherited from the supervisor.
LIVENESS_FD_VARIABLE = "BATON_LIVENESS_FD"
LIVENESS_PERIOD_SECONDS = 1.0


def consume_liveness_fd() -> int | None:
    """Return the descriptor of the supervisor's pipe, if any. Children do not inherit it."""
    number = os.environ.pop(LIVENESS_FD_VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        os.set_inheritable(int(number), False)
        os.set_blocking(int(number), False)
    except OSError:  # not a descriptor of this process
        return None
    return int(number)


async def send_liveness_signals(pipe: int) -> None:
    """Write a byte per period until cancelled. Errors of the pipe are ignored."""
    while True:
        with contextlib.suppress(OSError):
            os.write(pipe, b".")
        await asyncio.sleep(LIVENESS_PERIOD_SECONDS)  # the period itself, not a poll
