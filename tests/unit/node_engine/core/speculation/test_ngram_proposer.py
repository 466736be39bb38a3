"""Drafts from the sequence itself, beside a search through all of it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from node_engine.core.speculation import ngram_proposer
from node_engine.core.speculation.ngram_proposer import (
    MAX_CANDIDATES,
    MAX_INDEXED_TOKENS,
    MAX_MATCH_TOKENS,
    NgramProposer,
)


def count_matching(tokens: Sequence[int], position: int) -> int:
    """Tokens before `position` that are the last tokens of the sequence."""
    longest = min(position, MAX_MATCH_TOKENS)
    return next(
        (
            length
            for length in range(longest)
            if tokens[position - 1 - length] != tokens[len(tokens) - 1 - length]
        ),
        longest,
    )


def propose_by_search(tokens: Sequence[int], max_tokens: int) -> list[int]:
    """What NgramProposer proposes, without an index."""
    matches = [
        (count_matching(tokens, position), position)
        for position in reversed(range(2, len(tokens)))
        if count_matching(tokens, position) >= 2
    ][:MAX_CANDIDATES]
    if not matches:
        return []
    longest = max(length for length, _ in matches)
    start = next(position for length, position in matches if length == longest)
    draft = list(tokens)
    for offset in range(max_tokens):
        draft.append(draft[start + offset])
    return draft[len(tokens) :]


@given(
    prompt=st.lists(st.integers(0, 3), max_size=60),
    output=st.lists(st.integers(0, 3), max_size=40),
    max_tokens=st.integers(0, 12),
)
def test_the_draft_is_what_a_search_finds(
    prompt: list[int], output: list[int], max_tokens: int
) -> None:
    tokens = list(prompt)
    proposer = NgramProposer(tokens)
    for token in [*output, None]:
        assert proposer.propose_tokens(max_tokens) == propose_by_search(tokens, max_tokens)
        if token is not None:
            tokens.append(token)


@given(period=st.lists(st.integers(0, 5), min_size=1, max_size=20), max_tokens=st.integers(1, 40))
def test_a_loop_goes_on(period: list[int], max_tokens: int) -> None:
    loop = period * 40
    tokens = loop[: max(3 * len(period), 4) + MAX_MATCH_TOKENS]
    draft = NgramProposer(tokens).propose_tokens(max_tokens)
    assert (tokens + draft)[: len(loop)] == loop[: len(tokens) + max_tokens]


def test_text_that_does_not_recur_has_no_draft() -> None:
    assert NgramProposer(list(range(100))).propose_tokens(4) == []
    assert NgramProposer([5, 5]).propose_tokens(4) == []
    assert NgramProposer([]).propose_tokens(4) == []


def test_the_longest_match_wins_and_of_equals_the_latest() -> None:
    longer = [9, 1, 2, 7, 0, 8, 1, 2, 6, 0, 9, 1, 2]
    assert NgramProposer(longer).propose_tokens(2) == [7, 0]
    equal = [3, 1, 2, 7, 0, 4, 1, 2, 6, 0, 5, 1, 2]
    assert NgramProposer(equal).propose_tokens(2) == [6, 0]


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    tokens = [*range(3 * MAX_INDEXED_TOKENS), 10, 11]
    proposer = NgramProposer(tokens)
    assert proposer.propose_tokens(3) == [12, 13, 14], "it is in the part that is indexed first"
    late = [*range(3 * MAX_INDEXED_TOKENS), *(3 * MAX_INDEXED_TOKENS - 9 + n for n in range(4))]
    proposer = NgramProposer(late)
    drafts = [proposer.propose_tokens(1) for _ in range(4)]
    assert drafts == [[], [], [3 * MAX_INDEXED_TOKENS - 5], [3 * MAX_INDEXED_TOKENS - 5]]


def test_a_call_compares_a_bounded_number_of_candidates() -> None:
    class CountingTokens(list[int]):
        num_reads = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            CountingTokens.num_reads += 1
            return super().__getitem__(index)

    tokens = CountingTokens([1, 2] * 5 + [token % 97 + 10 for token in range(3000)] + [1, 2] * 500)
    proposer = NgramProposer(tokens)
    proposer.propose_tokens(1)
    for _ in range(3):
        tokens.append(1 if tokens[-1] == 2 else 2)
        CountingTokens.num_reads = 0
        proposer.propose_tokens(1)
        assert CountingTokens.num_reads <= 2 * MAX_CANDIDATES * MAX_MATCH_TOKENS + 8
    assert ngram_proposer.MIN_MATCH_TOKENS == 2
