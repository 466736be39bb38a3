"""Where an exception that nobody foresaw ends, on every front door."""

from baton import log
from baton.errors import BatonError

_log = log.get("front")


def internal(error: Exception) -> BatonError:
    """What a client learns of a defect of ours: nothing. The log gets its kind and place, but not its message, which
    may quote a prompt."""
    _log.error("internal error", kind=type(error).__name__, places=log.places(error))
    return BatonError("internal error: the coordinator's log has more")
