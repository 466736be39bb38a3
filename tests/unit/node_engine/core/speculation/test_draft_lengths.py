"""How many drafts a step verifies: as many as make it the most productive."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_engine.core.speculation.draft_lengths import (
    MIN_GAIN,
    DraftOffer,
    choose_draft_lengths,
    compute_speedup,
)

OFFERS = st.lists(
    st.builds(DraftOffer, st.integers(0, 3), st.floats(0.0, 1.0)), min_size=1, max_size=4
)


def tokens_per_second(
    offers: list[DraftOffer], lengths: list[int], fixed: float, cost: float
) -> float:
    gained = sum(
        offer.acceptance_rate**number
        for offer, length in zip(offers, lengths, strict=True)
        for number in range(1, length + 1)
    )
    seconds = 1.0 + (fixed + cost * sum(lengths) if sum(lengths) else 0.0)
    return (len(offers) + gained) / seconds


def choose(offers: list[DraftOffer], fixed: float, cost: float, max_tokens: int = 99) -> list[int]:
    return choose_draft_lengths(
        offers,
        num_sequences=len(offers),
        max_tokens=max_tokens,
        plain_seconds=1.0,
        verification_seconds=lambda drafts, longest: 1.0 + fixed + cost * drafts,
    )


@given(offers=OFFERS, fixed=st.floats(0.0, 0.5), cost=st.floats(0.0, 1.0))
def test_no_other_choice_is_more_productive(
    offers: list[DraftOffer], fixed: float, cost: float
) -> None:
    chosen = choose(offers, fixed, cost)
    rate = tokens_per_second(offers, chosen, fixed, cost)
    best = max(
        tokens_per_second(offers, list(lengths), fixed, cost)
        for lengths in itertools.product(*(range(offer.num_tokens + 1) for offer in offers))
    )
    assert all(n <= offer.num_tokens for n, offer in zip(chosen, offers, strict=True))
    if any(chosen):
        assert rate == pytest.approx(best)
        assert rate > MIN_GAIN * len(offers)
    else:
        assert best <= MIN_GAIN * len(offers) * (1 + 1e-9)


def test_there_are_no_drafts_where_each_costs_as_much_as_it_gives() -> None:
    likely = [DraftOffer(8, 0.9)] * 4
    assert choose(likely, 0.0, 0.01) == [8] * 4
    assert choose(likely, 0.0, 0.25) == [0] * 4, "a step that is bound by arithmetic"
    assert choose(likely, 10.0, 0.0) == [0] * 4
    assert choose([DraftOffer(8, 0.0)], 0.0, 0.01) == [0]


def test_drafts_go_to_the_sequences_that_accept_most() -> None:
    offers = [DraftOffer(8, 0.2), DraftOffer(8, 0.95), DraftOffer(0, 0.9)]
    lengths = choose(offers, 0.0, 0.08)
    assert lengths[1] > lengths[0]
    assert lengths[2] == 0
    assert choose(offers, 0.0, 0.08, max_tokens=1) == [0, 1, 0]
    assert choose(offers, 0.0, 0.08, max_tokens=0) == [0, 0, 0]


def test_the_speedup_is_that_of_the_choice_for_one_sequence() -> None:
    for rate, count, cost in ((0.8, 4, 0.1), (0.5, 1, 0.0), (1.0, 3, 0.2), (0.0, 5, 0.1)):
        offer = [DraftOffer(count, rate)]
        assert compute_speedup(rate, count, cost) == pytest.approx(
            tokens_per_second(offer, [count], 0.0, cost)
        )
    assert compute_speedup(0.9, 0, 0.5) == 1.0
