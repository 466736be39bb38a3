"""What a sequence learns from its drafts, verified or not."""

import pytest

from node_engine.core.speculation.acceptance_rate import INITIAL_RATE, AcceptanceRate
from node_engine.core.speculation.drafting import Drafting, DraftResult
from node_engine.core.speculation.ngram_proposer import NgramProposer

LOOP = [1, 2, 3, 1, 2, 3, 1, 2]


def make_drafting(tokens: list[int]) -> tuple[Drafting, AcceptanceRate]:
    node = AcceptanceRate()
    return Drafting(NgramProposer(tokens), node), node


def test_a_rate_follows_the_last_trials() -> None:
    rate = AcceptanceRate(0.5)
    rate.add_trials(200, is_wrong=False)
    assert rate.rate > 0.95
    for _ in range(200):
        rate.add_trials(0, is_wrong=True)
    assert rate.rate < 0.05
    rate.add_trials(20, is_wrong=False)
    assert rate.rate > 0.4, "it recovers within some tens of tokens"


@pytest.mark.parametrize(
    ("drawn", "has_ended", "expected"),
    [
        ([3, 1, 2, 3], False, DraftResult(3, 0, 0)),
        ([3, 1, 9], False, DraftResult(2, 1, 0)),
        ([9], False, DraftResult(0, 1, 2)),
        ([3, 1], True, DraftResult(1, 0, 2)),
        ([3], True, DraftResult(0, 0, 3)),
        ([], True, DraftResult(0, 0, 3)),
    ],
    ids=["all", "two", "none", "ends within", "ends at once", "breaks its grammar"],
)
def test_results_of_a_verified_draft(
    drawn: list[int], has_ended: bool, expected: DraftResult
) -> None:
    drafting, _ = make_drafting(list(LOOP))
    assert drafting.propose_tokens(3) == [3, 1, 2]
    drafting.verify_tokens(3)
    assert drafting.record_output(drawn, [3, 1, 2], has_ended=has_ended) == expected
    assert expected.num_drafted == 3


def test_a_draft_that_is_not_verified_is_learned_from_as_well() -> None:
    tokens = list(LOOP)
    drafting, node = make_drafting(tokens)
    for token in [3, 1, 2] * 20:
        drafting.propose_tokens(4)
        tokens.append(token)
        assert drafting.record_output([token], (), has_ended=False) == DraftResult()
    assert drafting.acceptance.rate > 0.95
    assert node.rate > INITIAL_RATE, "the next sequence begins with what was learned"
    assert Drafting(NgramProposer([]), node).acceptance.rate == pytest.approx(node.rate)
    before = drafting.acceptance.rate
    drafting.propose_tokens(4)
    drafting.record_output([9], (), has_ended=False)
    assert drafting.acceptance.rate < before


def test_a_draft_stops_before_the_end_of_the_output() -> None:
    drafting, _ = make_drafting(list(LOOP))
    assert drafting.propose_tokens(6) == [3, 1, 2, 3, 1, 2]
    assert drafting.cut_proposal(9, (2,)) == [3, 1]
    assert drafting.cut_proposal(1, ()) == [3]
    assert drafting.has_proposal
    assert drafting.cut_proposal(-1, ()) == []
    assert not drafting.has_proposal


def test_a_discarded_proposal_teaches_nothing() -> None:
    drafting, node = make_drafting(list(LOOP))
    drafting.propose_tokens(3)
    drafting.verify_tokens(2)
    assert drafting.verified_tokens == [3, 1]
    drafting.discard_proposal()
    assert not drafting.verified_tokens
    drafting.record_output([9], (), has_ended=False)
    assert drafting.acceptance.rate == node.rate == pytest.approx(INITIAL_RATE)
