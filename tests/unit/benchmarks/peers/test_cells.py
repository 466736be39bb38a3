"""What the cells of compared servers send, and their figures."""

from collections import Counter

import pytest

from benchmarks.load.measurement import RequestMeasurement
from benchmarks.peers.cells import (
    DEFAULT_CELLS,
    CellFigures,
    CellMedians,
    evaluate_cell,
    parse_cells,
)
from benchmarks.peers.report import make_tables, to_rows

CHAT, _, _, MIXED = parse_cells(DEFAULT_CELLS)


def measured(
    prompt: int, arrivals: list[float], *, usage: int | None = None, error: str = ""
) -> RequestMeasurement:
    """A request that was due at 10 s and ended with its last token."""
    return RequestMeasurement(
        10.0,
        64,
        [(moment, 1) for moment in arrivals],
        ended_at=arrivals[-1] if arrivals else 11.0,
        usage_tokens=usage,
        error=error,
        requested_prompt_tokens=prompt,
    )


def test_default_cells() -> None:
    names = [cell.name for cell in parse_cells(DEFAULT_CELLS)]
    assert names == ["chat_c1", "chat_c4", "chat_c16", "mixed_c4"]
    assert [cell.num_requests for cell in parse_cells(DEFAULT_CELLS)] == [8, 32, 80, 32]
    assert [cell.num_requests for cell in parse_cells("chat:10,12,32;mixed:1")] == [80, 80, 160, 32]


def test_every_eighth_request_of_the_mix_is_long_and_prompts_are_new() -> None:
    plan = MIXED.plan("seed")
    lengths = [(request.prompt_tokens, request.output_tokens) for request in plan]
    assert lengths == ([(64, 64)] * 7 + [(2048, 16)]) * 4
    assert plan == MIXED.plan("seed")
    ours, theirs = ({(one.salt, one.seed) for one in MIXED.plan(seed)} for seed in ("a", "b"))
    assert len(ours) == len(plan)
    assert not ours & theirs


@pytest.mark.parametrize("text", ["", "chat", "chat:", "chat:0", "chat:1,-1", "poem:1"])
def test_malformed_cells_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="--cells"):
        parse_cells(text)


def test_latencies_are_of_short_requests_and_throughput_of_all() -> None:
    seen = [
        measured(64, [10.5, 10.6, 11.5]),
        measured(64, [10.3, 10.4, 10.5]),
        measured(64, [10.4, 10.5, 10.6], usage=5),
        measured(2048, [12.0, 15.0, 20.0]),
        measured(64, [10.1], error="timeout"),
    ]
    figures = evaluate_cell(MIXED, seen)
    assert figures is not None
    assert figures.ttft == pytest.approx(0.4)
    assert figures.tpot == pytest.approx(0.1), "the median of 0.5, 0.1 and 0.2 / 4"
    assert figures.longest_gap == pytest.approx(0.9)
    assert figures.tokens_per_second == pytest.approx((3 + 3 + 5 + 3) / 10)
    assert figures.errors == {"timeout": 1}
    assert evaluate_cell(MIXED, seen[3:]) is None


def make_medians(*values: float | None, errors: int = 0, disturbed: int = 0) -> CellMedians:
    """One value for each round, which all of its figures have; None for a round without figures."""
    return CellMedians(
        {
            number: CellFigures(value, value, value, value, Counter({"timeout": errors}))
            for number, value in enumerate(values)
            if value is not None
        },
        disturbed,
    )


def test_rows_have_medians_their_range_and_ratios_to_the_peer() -> None:
    results = {
        "ours": {CHAT: make_medians(2.0, 9.0, 4.0, errors=1)},
        "peer": {CHAT: make_medians(4.0, 3.0, 5.0, disturbed=2)},
    }
    rows = {row.name: row for row in to_rows(results, ["peer"], {"ours": [7.0, 5.0]}, "command")}
    tpot = rows["serve/ours/chat_c1/tpot"]
    assert (tpot.value, tpot.unit) == (4000.0, "ms")
    assert tpot.note == "3 rounds, 2,000 to 9,000; 3 timeout"
    assert rows["serve/peer/chat_c1/tokens"].note == "3 rounds, 3 to 5; 2 of them disturbed"
    for figure in ("ttft", "tpot", "longest_gap", "tokens"):
        ratio = rows[f"serve/ours/chat_c1/{figure}_of_peer"].value
        assert ratio == 0.8, "the median of 0.5, 3 and 0.8, not the ratio of the medians"
    assert rows["serve/ours/start"].value == 5.0
    assert not [name for name in rows if "peer/chat_c1" in name and "_of_" in name]
    (table,) = make_tables(results, ["peer"])
    assert table.row_count == 2


def test_ratios_are_of_rounds_that_both_have() -> None:
    ours, peer = make_medians(None, 6.0, 8.0), make_medians(1.0, 2.0, None)
    assert ours.median_ratio(peer, "tpot") == 3.0
    missing = make_medians(None, None, 5.0)
    assert missing.median_ratio(peer, "tpot") is None
    results = {"ours": {CHAT: missing}, "peer": {CHAT: peer}}
    assert not [row for row in to_rows(results, ["peer"], {}, "command") if "_of_" in row.name]
    (table,) = make_tables(results, ["peer"])
    assert list(table.columns[-1].cells) == ["", ""]
