"""Where prompt tokens came from, into the counters: once for each attempt, and what was computed again apart."""

from coordinator.core import sources
from coordinator.core.counters import Counters
from coordinator.core.record import Attempt, Record


def count_sources(record: Record, attempt: Attempt, counters: Counters, *, last: bool = False) -> None:
    """Once an attempt: when both nodes have reported, or with what is known at its end (`last`)."""
    complete = attempt.admitted is not None and (attempt.prefill is None or attempt.ended is not None)
    known = attempt.admitted is not None or attempt.ended is not None
    if attempt.counted or not (complete or (last and known)):
        return
    attempt.counted = True
    if record.sources is None:
        record.sources = sources.split(attempt.ended, attempt.admitted)
        if attempt.key.attempt > 1:
            by_prefill = attempt.prefill is not None
            record.sources = sources.without_own(record.sources, record.cached_before, prefill=by_prefill)
        for source, tokens in record.sources._asdict().items() if not record.internal else ():
            counters.prompt_tokens[source] += tokens
    else:
        recomputed = sources.computed(attempt.ended, attempt.admitted)
        counters.recomputed_tokens[record.replaced_because] += recomputed
