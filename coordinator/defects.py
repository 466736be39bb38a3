"""Where an exception that nobody foresaw ends, on every front door."""

from pathlib import Path

from baton import log
from baton.errors import BatonError

_DEPTH = 8  # innermost frames that a log line names
_log = log.get("front")


def internal(error: Exception) -> BatonError:
    """What a client learns of a defect of ours: nothing. The log gets its kind and place, but not its message, which
    may quote a prompt."""
    _log.error("internal error", kind=type(error).__name__, places=_places(error))
    return BatonError("internal error: the coordinator's log has more")


def _places(error: Exception) -> list[str]:
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return places[-_DEPTH:]
