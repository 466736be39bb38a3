"""Where prompt tokens came from: every token once, whatever the two nodes found where."""

import pytest

from baton.types import AttemptKey, RequestId
from coordinator.core.messages import Admitted, PrefillEnded
from coordinator.core.sources import Sources, split, without_own

KEY = AttemptKey(RequestId("r"), 1, 0)


def ended(computed: int, cached: int, pooled: int = 0, remote: int = 0) -> PrefillEnded:
    return PrefillEnded(KEY, computed, cached, 0.0, pooled, remote)


def admitted(computed: int, cached: int, received: int, pooled: int = 0, remote: int = 0) -> Admitted:
    return Admitted(KEY, computed, cached, received, 0.0, pooled, remote)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (None, None, Sources(0, 0, 0, 0, 0)),
        (ended(20, 800, 800, 800), None, Sources(20, 0, 0, 0, 800)),
        (ended(20, 800, 800, 300), None, Sources(20, 0, 0, 500, 300)),
        (ended(20, 800, 800, 800), admitted(0, 800, 20, 800, 800), Sources(20, 0, 0, 0, 800)),
        (ended(20, 800, 800, 300), admitted(0, 0, 820), Sources(20, 0, 0, 500, 300)),
        (ended(20, 800, 700, 300), admitted(0, 0, 820), Sources(20, 0, 100, 400, 300)),
        (ended(20, 800, 800, 800), admitted(0, 800, 20, 800), Sources(20, 0, 0, 0, 800)),
        (ended(20, 800, 800), admitted(0, 800, 20, 800, 300), Sources(20, 0, 0, 500, 300)),
        (ended(820, 0), admitted(0, 800, 20, 640, 320), Sources(20, 0, 160, 320, 320)),
        (None, admitted(20, 800, 0, 800, 300), Sources(0, 20, 0, 500, 300)),
    ],
)
def test_every_token_counts_once(prefill: PrefillEnded | None, decode: Admitted | None, expected: Sources) -> None:
    assert split(prefill, decode) == expected
    assert expected.cached == sum(expected) - expected.computed_prefill - expected.computed_decode


@pytest.mark.parametrize(
    ("found", "known", "expected"),
    [
        (Sources(1, 0, 0, 63), 0, Sources(64, 0, 0, 0)),
        (Sources(1, 0, 16, 47), 16, Sources(48, 0, 16, 0)),
        (Sources(1, 0, 16, 16, 31), 20, Sources(44, 0, 16, 4)),
        (Sources(1, 0, 63, 0), 64, Sources(1, 0, 63, 0)),
    ],
)
def test_what_an_earlier_attempt_may_have_computed_is_no_hit(found: Sources, known: int, expected: Sources) -> None:
    assert without_own(found, known, prefill=True) == expected
    other = without_own(found, known, prefill=False)
    assert (other.computed_prefill, other.cached) == (found.computed_prefill, expected.cached)
    assert sum(other) == sum(found)
