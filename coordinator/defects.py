"""Where an exception that nobody foresaw ends, on every front door."""

from baton import log
from baton.errors import BatonError
from baton.process.log_rate import RateLimitedLog

_log = log.get("front")
_limited = RateLimitedLog()


def internal(error: Exception) -> BatonError:
    """What a client learns of a defect of ours: nothing. The log gets its kind and place, but not its message, which
    may quote a prompt."""
    described = log.describe_error(error)
    _limited.write(_log.error, "internal error", per=described["kind"], **described)
    return BatonError("internal error: the coordinator's log has more")
