"""Every prompt token has one source, whatever the two nodes report."""

import pytest

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.types import AttemptKey, RequestId
from coordinator.core.requests.token_sources import (
    TokenSources,
    compute_token_sources,
    count_computed_tokens,
    exclude_own_tokens,
)

KEY = AttemptKey(RequestId("r"), 1, 0)


def ended(computed: int, cached: int, pooled: int = 0, remote: int = 0) -> PrefillEnded:
    return PrefillEnded(KEY, computed, cached, 0.0, pooled, remote)


def admitted(
    computed: int, cached: int, received: int, pooled: int = 0, remote: int = 0
) -> DecodeStarted:
    return DecodeStarted(KEY, computed, cached, received, 0.0, pooled, remote)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (None, None, TokenSources(0, 0, 0, 0, 0)),
        (ended(20, 800, 800, 800), None, TokenSources(20, 0, 0, 0, 800)),
        (ended(20, 800, 800, 300), None, TokenSources(20, 0, 0, 500, 300)),
        (ended(20, 800, 800, 800), admitted(0, 800, 20, 800, 800), TokenSources(20, 0, 0, 0, 800)),
        (ended(20, 800, 800, 300), admitted(0, 0, 820), TokenSources(20, 0, 0, 500, 300)),
        (ended(20, 800, 700, 300), admitted(0, 0, 820), TokenSources(20, 0, 100, 400, 300)),
        (ended(20, 800, 800, 800), admitted(0, 800, 20, 800), TokenSources(20, 0, 0, 0, 800)),
        (ended(20, 800, 800), admitted(0, 800, 20, 800, 300), TokenSources(20, 0, 0, 500, 300)),
        (ended(820, 0), admitted(0, 800, 20, 640, 320), TokenSources(20, 0, 160, 320, 320)),
        (None, admitted(20, 800, 0, 800, 300), TokenSources(0, 20, 0, 500, 300)),
    ],
)
def test_every_prompt_token_has_one_source(
    prefill: PrefillEnded | None, decode: DecodeStarted | None, expected: TokenSources
) -> None:
    assert compute_token_sources(prefill, decode) == expected
    assert (
        expected.cached_tokens
        == sum(expected) - expected.computed_prefill - expected.computed_decode
    )


@pytest.mark.parametrize(
    ("found", "known", "expected"),
    [
        (TokenSources(1, 0, 0, 63), 0, TokenSources(64, 0, 0, 0)),
        (TokenSources(1, 0, 16, 47), 16, TokenSources(48, 0, 16, 0)),
        (TokenSources(1, 0, 16, 16, 31), 20, TokenSources(44, 0, 16, 4)),
        (TokenSources(1, 0, 63, 0), 64, TokenSources(1, 0, 63, 0)),
    ],
)
def test_tokens_of_earlier_attempt_are_not_cache_hits(
    found: TokenSources, known: int, expected: TokenSources
) -> None:
    assert exclude_own_tokens(found, known, prefill=True) == expected
    other = exclude_own_tokens(found, known, prefill=False)
    assert (other.computed_prefill, other.cached_tokens) == (
        found.computed_prefill,
        expected.cached_tokens,
    )
    assert sum(other) == sum(found)


KEY = AttemptKey(RequestId("r"), 1, 0)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((20, 0), (0, 0, 20), TokenSources(20, 0, 0, 0)),
        ((4, 16), (0, 0, 20), TokenSources(4, 0, 16, 0)),
        ((4, 16), (0, 16, 4), TokenSources(4, 0, 16, 0)),  # both held it: once
        (
            (20, 0),
            (0, 16, 4),
            TokenSources(4, 0, 16, 0),
        ),  # prefill computed it again to reach the rest
        (None, (20, 0, 0), TokenSources(0, 20, 0, 0)),
        (None, (1, 19, 0), TokenSources(0, 1, 19, 0)),
        ((20, 0), None, TokenSources(20, 0, 0, 0)),
        (None, None, TokenSources(0, 0, 0, 0)),
    ],
)
def test_sources_follow_from_both_nodes_reports(
    prefill: tuple[int, int] | None, decode: tuple[int, int, int] | None, expected: TokenSources
) -> None:
    ended = PrefillEnded(KEY, *prefill) if prefill else None
    admitted = DecodeStarted(KEY, *decode) if decode else None
    assert compute_token_sources(ended, admitted) == expected
    assert (
        count_computed_tokens(ended, admitted) == (prefill or (0, 0))[0] + (decode or (0, 0, 0))[0]
    )
