"""Stop strings, against the plainest search there is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.detokenizer import StopStringMatcher

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


def find_stop_naively(text: str, stops: list[str]) -> int | None:
    """Where the match begins that ends first; of those that end together, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(WORDS, min_size=1, max_size=4),
    st.lists(st.text(alphabet="abc", max_size=3), max_size=12),
)
def test_matcher_equals_naive_search_and_holds_possible_prefixes(
    stops: list[str], steps: list[str]
) -> None:
    search = StopStringMatcher(stops)
    text = ""
    for step in steps:
        found = search.feed_text(step)
        text += step
        assert found == find_stop_naively(text, stops)
        if found is not None:
            break
        beginnings = [
            size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])
        ]
        assert search.held_characters == max(beginnings)


def test_skipped_characters_are_not_matched() -> None:
    search = StopStringMatcher(["ab"])
    search.skip_characters(3)
    assert search.feed_text("b") is None
    assert search.feed_text("xab") == 5
