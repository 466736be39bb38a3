"""The figures of `bench interference`, from moments and windows that are given."""

import asyncio

import pytest

from baton.errors import NodeFailed
from benchmarks.interference import (
    WINDOW_KINDS,
    DecodeStream,
    InterferenceSamples,
    WindowSample,
    to_rows,
)

IDLE = [WindowSample(0.010, 0.008), WindowSample(0.020, 0.008), WindowSample(0.010, 0.008)]


def seen(computed: list[WindowSample], moved: float = 8e6) -> dict[str, InterferenceSamples]:
    return {
        name: InterferenceSamples(computed if name == "computed" else IDLE, IDLE, moved)
        for name in WINDOW_KINDS
    }


def test_gaps_are_those_whose_ends_both_lie_in_the_window() -> None:
    stream = DecodeStream([0.0, 1.0, 1.25, 1.5, 3.0], asyncio.Event())
    assert stream.find_gaps(1.0, 2.0) == [0.25, 0.25]
    assert stream.find_gaps(2.0, 4.0) == []


def test_ratios_are_medians_of_rounds_and_held_against_the_limit() -> None:
    """A round in which the whole machine was slower counts as much as another."""
    rows = {
        row.name: row
        for row in to_rows(
            "zmq",
            seen(
                [WindowSample(0.011, 0.009), WindowSample(0.030, 0.010), WindowSample(0.013, 0.012)]
            ),
            2.0,
            "command",
        )
    }
    computed = rows["interference/zmq/computed"]
    assert (computed.value, computed.limit) == pytest.approx((1.3, 1.2))
    assert rows["interference/zmq/computed_cpu"].value == pytest.approx(1.25)
    assert computed.share == pytest.approx(1.3 / 1.2)
    assert rows["interference/zmq/idle_step"].value == pytest.approx(10.0)
    assert rows["interference/zmq/prefill"].limit is None
    assert rows["interference/zmq/computed_moved"].value == pytest.approx(4.0)


def test_windows_in_which_nothing_was_handed_over_say_nothing() -> None:
    with pytest.raises(NodeFailed, match="nothing was handed over by grpc"):
        to_rows("grpc", seen(IDLE, moved=0.0), 2.0, "command")
