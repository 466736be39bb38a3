"""Adds the sources of prompt tokens to the counters, once for each attempt.

Tokens that a later attempt computes again are counted separately.
"""

from coordinator.core.common.counters import Counters
from coordinator.core.requests import token_sources as sources
from coordinator.core.requests.record import Attempt, RequestRecord


def count_token_sources(
    record: RequestRecord, attempt: Attempt, counters: Counters, *, last: bool = False
) -> None:
    """Count an attempt once: when both nodes have reported, or at its end (`last`)."""
    complete = attempt.decode_report is not None and (
        attempt.prefill is None or attempt.prefill_report is not None
    )
    known = attempt.decode_report is not None or attempt.prefill_report is not None
    if attempt.is_counted or not (complete or (last and known)):
        return
    attempt.is_counted = True
    if record.token_sources is None:
        record.token_sources = sources.compute_token_sources(
            attempt.prefill_report, attempt.decode_report
        )
        if attempt.key.attempt_number > 1:
            by_prefill = attempt.prefill is not None
            record.token_sources = sources.exclude_own_tokens(
                record.token_sources, record.cached_at_first_placement, prefill=by_prefill
            )
        for source, tokens in (
            record.token_sources._asdict().items() if not record.is_internal else ()
        ):
            counters.prompt_tokens[source] += tokens
    else:
        recomputed = sources.count_computed_tokens(attempt.prefill_report, attempt.decode_report)
        counters.recomputed_tokens[record.replace_reason] += recomputed
