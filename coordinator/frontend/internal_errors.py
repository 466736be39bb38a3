"""Turns unexpected exceptions into the error that clients see, for HTTP and gRPC."""

from baton.errors import BatonError
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger

_log = log.get_logger("front")
_limited = RateLimitedLogger()


def to_internal_error(error: Exception) -> BatonError:
    """Return an error without details for the client, and log the kind and place of the defect.

    The message is not logged, because it may quote a prompt.
    """
    described = log.get_error_fields(error)
    _limited.log_event(
        _log.error, "internal error", rate_limit_key=described["error_type"], **described
    )
    return BatonError("internal error: the coordinator's log has more")
