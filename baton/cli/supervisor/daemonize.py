"""`baton up --detach`: continue in the background after all checks that need no process."""

import os
import signal
import sys
from pathlib import Path

from baton.cli.common.errors import EXIT_INTERRUPTED

_LOG_TAIL_BYTES = 4096  # end of the log that are shown after a failure


def daemonize(log: Path) -> None:
    """Fork. Only the child returns, in a new session.

    The child's standard output goes to the caller's terminal until `close_announcement()`, its
    standard error to `log`. The parent exits with 0 once the child has announced, else with the
    child's exit code and the end of its log. Ctrl-C before that stops the child.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiver)
        os.setsid()
        _redirect(sender, log)
        return
    os.close(sender)
    try:
        with os.fdopen(receiver, "rb") as announcement:
            text = announcement.read()
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        sys.exit(EXIT_INTERRUPTED)
    if text:
        sys.stdout.write(text.decode())
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    log_tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
    sys.stderr.write(log_tail)
    sys.exit(os.waitstatus_to_exitcode(status) or 1)


def close_announcement() -> None:
    """Redirect standard output to /dev/null, which lets the parent exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _redirect(sender: int, log: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (sender, 1), (log_file, 2)):
        os.dup2(source, target)
        os.close(source)
