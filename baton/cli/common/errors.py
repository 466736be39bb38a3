"""What a command can fail with beyond the errors of baton/errors.py, and the exit code of each."""

import sys

from baton.errors import BatonError, ConfigError

EXIT_FAILURE, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3


class CommandFailed(BatonError):
    """The thing asked about is bad, or the cluster answered with an error. The message says all."""


class EndpointUnreachable(BatonError):
    """Nothing answers at the endpoint."""


def innermost_error(error: BaseException) -> BaseException:
    """The first error inside an exception group, however deep: what a task group was ended by."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def exit_code(error: BatonError) -> int:
    """The exit code that the command-line contract gives this error."""
    if isinstance(error, EndpointUnreachable):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE


def print_error(error: BatonError, *, as_json: bool) -> None:
    """One line on standard error: plain words, or a line as a log has them, of a command whose
    output is a log."""
    if as_json:
        from baton.process import log

        log.configure_logging("error", "json", node="up")
        log.log_fatal_error(str(error))
        log.flush_log()
    else:
        sys.stderr.write(f"error: {error}\n")
