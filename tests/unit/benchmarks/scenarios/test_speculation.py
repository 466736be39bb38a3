"""The terms of the speed-up formula, from what a client measures and a node counts."""

import pytest

from benchmarks.scenarios.speculation import (
    CONTROL,
    OFF,
    ON,
    WorkloadRounds,
    build_table,
    measure_terms,
)


def make_rounds(
    accepted: int, rejected: int, unused: int, drafts: int, cost: float
) -> WorkloadRounds:
    """Rounds of 1000 output tokens in which each draft token costs `cost` plain steps of 2 ms."""
    steps = 1000 - accepted
    seconds = 0.002 * (steps + cost * (accepted + rejected + unused))
    return WorkloadRounds(
        tokens_per_second={
            OFF: [500.0, 400.0, 500.0],
            ON: [1000.0, 800.0, 900.0],
            CONTROL: [510.0, 400.0, 400.0],
        },
        token_seconds={OFF: [0.002] * 3, ON: [seconds / 1000] * 3},
        counters={
            "baton_drafts_total": float(drafts),
            'baton_draft_tokens_total{result="accepted"}': float(accepted),
            'baton_draft_tokens_total{result="rejected"}': float(rejected),
            'baton_draft_tokens_total{result="unused"}': float(unused),
        },
        output_tokens=1000,
    )


def test_terms_are_found_again() -> None:
    rounds = make_rounds(accepted=600, rejected=100, unused=100, drafts=200, cost=0.05)
    terms = measure_terms(rounds)
    assert terms is not None
    assert terms.acceptance_rate == pytest.approx(6 / 7)
    assert terms.num_drafts == pytest.approx(4.0)
    assert terms.relative_cost == pytest.approx(0.05)
    a, k, c = 6 / 7, 4, 0.05
    assert terms.speedup == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (1 + k * c)))
    assert rounds.compute_ratio() == 2.0
    assert rounds.compute_ratio(CONTROL) == 1.0


def test_without_drafts_there_is_no_formula() -> None:
    rounds = make_rounds(accepted=0, rejected=0, unused=0, drafts=0, cost=0.0)
    assert measure_terms(rounds) is None
    assert build_table({"random": rounds}).row_count == 1


def test_a_faster_run_than_drafts_explain_has_no_negative_cost() -> None:
    rounds = make_rounds(accepted=600, rejected=100, unused=100, drafts=200, cost=-0.2)
    terms = measure_terms(rounds)
    assert terms is not None
    assert terms.relative_cost == 0.0
