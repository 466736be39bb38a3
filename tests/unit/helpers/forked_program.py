"""The program that test_fork_server.py forks: it prints its environment, then exits or waits."""

import atexit
import json
import os
import resource
import signal
import sys
import threading

from baton.process.startup import STARTUP


def end_late() -> None:
    """Leave a thread and an exit handler that print after the program's last line."""

    def wait_for_main_thread() -> None:
        threading.main_thread().join()
        print("thread")  # noqa: T201

    atexit.register(print, "exit handler")
    threading.Thread(target=wait_for_main_thread).start()


if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "is_session_leader": os.getsid(0) == os.getpid(),
        "started_at": STARTUP._phase_started_at,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    print(json.dumps(found), flush=True)  # noqa: T201
    if os.environ["END"] == "wait":
        signal.pause()
    if os.environ["END"] == "late":
        end_late()
        sys.exit("reason")
    sys.exit(int(os.environ["END"]))
