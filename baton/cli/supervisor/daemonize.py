"""`up --detach`: go on in the background once everything that can be checked at once has been."""

import os
import sys
from pathlib import Path

_LOG_TAIL_BYTES = 4096  # bytes of the log that are shown after a failure


def daemonize(log: Path) -> None:
    """Fork. The child returns, in a session of its own: what it writes on standard output goes to
    the caller's terminal until `announced()`, its standard error to `log`. The parent never
    returns: it exits with 0 when the child has announced, else with the child's exit code and what
    it said last."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        os.setsid()
        _redirect(sender, log)
        return
    os.close(sender)
    with os.fdopen(receiver, "rb") as announcement:
        text = announcement.read()
    if text:
        sys.stdout.write(text.decode())
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    said = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
    sys.stderr.write(said)
    sys.exit(os.waitstatus_to_exitcode(status) or 1)


def close_announcement() -> None:
    """Let the parent go: from now on nobody reads standard output."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def _redirect(sender: int, log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    lines = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (sender, 1), (lines, 2)):
        os.dup2(source, target)
        os.close(source)
