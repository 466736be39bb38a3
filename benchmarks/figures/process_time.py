"""CPU time of a process."""

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of all threads of a process so far (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
