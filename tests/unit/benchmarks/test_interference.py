"""The figures of `bench interference`, from moments and windows that are given."""

import asyncio

import pytest

from baton.errors import NodeFailed
from benchmarks.interference import WINDOWS, Seen, Stream, Window, to_rows

IDLE = [Window(0.010, 0.008), Window(0.020, 0.008), Window(0.010, 0.008)]


def seen(computed: list[Window], moved: float = 8e6) -> dict[str, Seen]:
    return {name: Seen(computed if name == "computed" else IDLE, IDLE, moved) for name in WINDOWS}


def test_gaps_are_those_whose_ends_both_lie_in_the_window() -> None:
    stream = Stream([0.0, 1.0, 1.25, 1.5, 3.0], asyncio.Event())
    assert stream.gaps(1.0, 2.0) == [0.25, 0.25]
    assert stream.gaps(2.0, 4.0) == []


def test_ratios_are_medians_of_rounds_and_held_against_the_limit() -> None:
    """A round in which the whole machine was slower counts as much as another."""
    rows = {
        one.name: one
        for one in to_rows(
            "zmq", seen([Window(0.011, 0.009), Window(0.030, 0.010), Window(0.013, 0.012)]), 2.0, "command"
        )
    }
    computed = rows["interference/zmq/computed"]
    assert (computed.value, computed.limit) == (pytest.approx(1.3), 1.2)
    assert rows["interference/zmq/computed_cpu"].value == pytest.approx(1.25)
    assert computed.share == pytest.approx(1.3 / 1.2)
    assert rows["interference/zmq/idle_step"].value == pytest.approx(10.0)
    assert rows["interference/zmq/prefill"].limit is None
    assert rows["interference/zmq/computed_moved"].value == pytest.approx(4.0)


def test_windows_in_which_nothing_was_handed_over_say_nothing() -> None:
    with pytest.raises(NodeFailed, match="nothing was handed over by grpc"):
        to_rows("grpc", seen(IDLE, moved=0.0), 2.0, "command")
