"""The program that test_fork_server.py forks: it prints its environment, then exits or waits."""

import json
import os
import resource
import signal
import sys

if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "is_session_leader": os.getsid(0) == os.getpid(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    print(json.dumps(found), flush=True)  # noqa: T201
    if os.environ["END"] == "wait":
        signal.pause()
    sys.exit(int(os.environ["END"]))
