"""Where the prompt tokens of one attempt came from, each counted once."""

from typing import NamedTuple

from coordinator.core.messages import Admitted, PrefillEnded


class Sources(NamedTuple):
    """Tokens. The fields are values of the label `source` of baton_prompt_tokens_total."""

    computed_prefill: int
    computed_decode: int
    local_cache: int
    pool: int
    remote_pool: int = 0

    @property
    def cached(self) -> int:
        return self.local_cache + self.pool + self.remote_pool


def split(ended: PrefillEnded | None, admitted: Admitted | None) -> Sources:
    """What decode held counts as its cache or the pool's, even where prefill had to compute it again to reach what
    decode lacked. A prefix that a cache and the pool have begins in the cache. What was fetched for either of the two
    nodes was fetched for the attempt. No figure is below zero, whatever nodes say."""
    if admitted is None:
        if ended is None:
            return Sources(0, 0, 0, 0, 0)
        pooled = min(ended.pooled_tokens, ended.cached_tokens)
        remote = min(ended.remote_tokens, pooled)
        return Sources(ended.computed_tokens, 0, ended.cached_tokens - pooled, pooled - remote, remote)
    cached_there = max(0, ended.cached_tokens - admitted.cached_tokens) if ended else 0
    received_cached = min(cached_there, admitted.received_tokens)
    received_pooled = min(received_cached, ended.pooled_tokens) if ended else 0
    pooled = min(admitted.pooled_tokens, admitted.cached_tokens)
    remote = min(pooled + received_pooled, max(admitted.remote_tokens, ended.remote_tokens if ended else 0))
    return Sources(
        computed_prefill=admitted.received_tokens - received_cached,
        computed_decode=admitted.computed_tokens,
        local_cache=admitted.cached_tokens - pooled + received_cached - received_pooled,
        pool=pooled + received_pooled - remote,
        remote_pool=remote,
    )


def without_own(found: Sources, known: int, *, prefill: bool) -> Sources:
    """The sources of a request that was placed before, when caches had `known` tokens of its prompt. What was found
    beyond them may be what an earlier attempt of the same request computed: it counts as computed, by a prefill node if
    `prefill`, and never as a hit."""
    beyond = max(0, found.cached - known)
    counts = found._asdict()
    for source in ("remote_pool", "pool", "local_cache"):  # a prefix begins in the cache and ends in the pool
        own = min(beyond, counts[source])
        counts[source] -= own
        beyond -= own
        counts["computed_prefill" if prefill else "computed_decode"] += own
    return Sources(**counts)


def computed(ended: PrefillEnded | None, admitted: Admitted | None) -> int:
    """Tokens that any node computed."""
    return (ended.computed_tokens if ended else 0) + (admitted.computed_tokens if admitted else 0)
