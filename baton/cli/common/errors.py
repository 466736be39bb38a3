"""Errors of the command line beyond baton/errors.py, and the exit code of each."""

import signal
import sys

from baton.errors import BatonError, ConfigError

EXIT_FAILURE, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3
EXIT_INTERRUPTED = 128 + signal.SIGINT


class CommandFailed(BatonError):
    """The checked object is bad, or the cluster answered with an error."""


class EndpointUnreachable(BatonError):
    """Nothing answers at the endpoint."""


def innermost_error(error: BaseException) -> BaseException:
    """Return the first error inside an exception group, at any depth."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def exit_code(error: BatonError) -> int:
    """Return the documented exit code for this error."""
    if isinstance(error, EndpointUnreachable):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


def print_error(error: BatonError, *, as_json: bool) -> None:
    """Print the error as one line on standard error.

    `as_json` prints a JSON log line, for a command whose output is a log.
    """
    if as_json:
        from baton.process import log

        log.configure_logging("error", "json", node="up")
        log.log_fatal_error(str(error))
        log.flush_log()
    else:
        sys.stderr.write(f"error: {error}\n")
