"""A process's sign of life for its supervisor: its event loop writes a byte into a pipe now and then."""

import asyncio
import contextlib
import os

VARIABLE = "BATON_LIVENESS_FD"  # the descriptor of the pipe, inherited from the supervisor
PERIOD = 1.0  # seconds between signs of life


def inherited_pipe() -> int | None:
    """The pipe that the supervisor gave this process, if it has one. It is not passed on to children."""
    number = os.environ.pop(VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        os.set_inheritable(int(number), False)
        os.set_blocking(int(number), False)
    except OSError:  # not ours after all
        return None
    return int(number)


async def show_signs_of_life(pipe: int) -> None:
    """Until cancelled. A supervisor that does not read, or is gone, is none of this process's business."""
    while True:
        with contextlib.suppress(OSError):
            os.write(pipe, b".")
        await asyncio.sleep(PERIOD)  # the period itself, not a poll
