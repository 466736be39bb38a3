"""A process's sign of life for its supervisor: its event loop writes a byte into a pipe now and
then."""

import asyncio
import contextlib
import os

LIVENESS_FD_VARIABLE = (
    "BATON_LIVENESS_FD"  # the descriptor of the pipe, inherited from the supervisor
)
LIVENESS_PERIOD_SECONDS = 1.0  # seconds between signs of life


def take_inherited_pipe() -> int | None:
    """The pipe that the supervisor gave this process, if it has one. It is not passed on to
    children."""
    number = os.environ.pop(LIVENESS_FD_VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        os.set_inheritable(int(number), False)
        os.set_blocking(int(number), False)
    except OSError:  # not ours after all
        return None
    return int(number)


async def send_liveness_signals(pipe: int) -> None:
    """Until cancelled. A supervisor that does not read, or is gone, is none of this process's
    business."""
    while True:
        with contextlib.suppress(OSError):
            os.write(pipe, b".")
        await asyncio.sleep(LIVENESS_PERIOD_SECONDS)  # the period itself, not a poll
