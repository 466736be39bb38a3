"""Where an exception that nobody foresaw ends, on every front door."""

from baton.errors import BatonError
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger

_log = log.get_logger("front")
_limited = RateLimitedLogger()


def to_internal_error(error: Exception) -> BatonError:
    """What a client learns of a defect of ours: nothing. The log gets its kind and place, but not
    its message, which may quote a prompt."""
    described = log.get_error_fields(error)
    _limited.log_event(_log.error, "internal error", per=described["kind"], **described)
    return BatonError("internal error: the coordinator's log has more")
