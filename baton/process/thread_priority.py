"""The priority of threads that give way to others of their process."""

import os
import threading
from contextlib import suppress

_NICENESS = 10


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread, unless it is as low already.

    On Linux each thread has a priority of its own. Does not raise: where it cannot be lowered, the
    thread works all the same.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        # To raise it would need a privilege that processes in containers lack.
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
