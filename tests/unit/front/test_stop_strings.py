"""Stop strings, against the plainest search there is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.stop_strings import StopStrings

WORDS = st.text(alphabet="ab", min_size=1, max_size=4)


def plain(text: str, stops: list[str]) -> int | None:
    """Where the match begins that ends first; of those that end together, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


@settings(max_examples=500)
@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=3), max_size=12))
def test_it_finds_what_a_search_finds_and_holds_what_may_begin_one(stops: list[str], steps: list[str]) -> None:
    search = StopStrings(stops)
    text = ""
    for step in steps:
        found = search.add(step)
        text += step
        assert found == plain(text, stops)
        if found is not None:
            break
        beginnings = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert search.held == max(beginnings)


def test_what_is_skipped_is_no_part_of_a_match() -> None:
    search = StopStrings(["ab"])
    search.skip(3)
    assert search.add("b") is None
    assert search.add("xab") == 5
