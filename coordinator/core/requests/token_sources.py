"""Where the prompt tokens of one attempt came from, each counted once."""

from typing import NamedTuple

from baton.cluster_link.messages import DecodeStarted, PrefillEnded


class TokenSources(NamedTuple):
    """Numbers of prompt tokens; the field names are values of the metric label `source`."""

    computed_prefill: int
    computed_decode: int
    local_cache: int
    pool: int
    remote_pool: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.local_cache + self.pool + self.remote_pool


def compute_token_sources(
    ended: PrefillEnded | None, admitted: DecodeStarted | None
) -> TokenSources:
    """Compute where the prompt tokens of one attempt came from, from the reports of both nodes.

    Tokens that decode had cached count as cached even if prefill had to compute them to reach what
    decode lacked. Where a cache and the pool both have a prefix, the cache is counted first. No
    number is negative, whatever nodes report.
    """
    if admitted is None:
        if ended is None:
            return TokenSources(0, 0, 0, 0, 0)
        pooled = min(ended.pool_tokens, ended.cached_tokens)
        remote = min(ended.remote_pool_tokens, pooled)
        return TokenSources(
            ended.computed_tokens, 0, ended.cached_tokens - pooled, pooled - remote, remote
        )
    cached_there = max(0, ended.cached_tokens - admitted.cached_tokens) if ended else 0
    received_cached = min(cached_there, admitted.received_tokens)
    received_pooled = min(received_cached, ended.pool_tokens) if ended else 0
    pooled = min(admitted.pool_tokens, admitted.cached_tokens)
    remote = min(
        pooled + received_pooled,
        max(admitted.remote_pool_tokens, ended.remote_pool_tokens if ended else 0),
    )
    return TokenSources(
        computed_prefill=admitted.received_tokens - received_cached,
        computed_decode=admitted.computed_tokens,
        local_cache=admitted.cached_tokens - pooled + received_cached - received_pooled,
        pool=pooled + received_pooled - remote,
        remote_pool=remote,
    )


def exclude_own_tokens(found: TokenSources, known: int, *, prefill: bool) -> TokenSources:
    """Remove cache hits that an earlier attempt of the same request may have produced.

    `known` is what caches had of the prompt at the first placement. Hits beyond it count as
    computed, by a prefill node if `prefill`.
    """
    beyond = max(0, found.cached_tokens - known)
    counts = found._asdict()
    for source in (
        "remote_pool",
        "pool",
        "local_cache",
    ):  # a prefix begins in the cache and ends in the pool
        own = min(beyond, counts[source])
        counts[source] -= own
        beyond -= own
        counts["computed_prefill" if prefill else "computed_decode"] += own
    return TokenSources(**counts)


def count_computed_tokens(ended: PrefillEnded | None, admitted: DecodeStarted | None) -> int:
    """Return the tokens that any node computed."""
    return (ended.computed_tokens if ended else 0) + (admitted.computed_tokens if admitted else 0)
