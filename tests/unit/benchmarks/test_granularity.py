"""The figures of `bench granularity`, from hand-offs that are given."""

import pytest

from baton.pb.common_pb2 import HandoffReport
from benchmarks.granularity import MAX_OF_WHOLE, GranularitySample, to_rows


def make_granularity_samples(*landed: float) -> list[GranularitySample]:
    return [
        GranularitySample(
            HandoffReport(
                compute_seconds=seconds - 0.25, slowed_seconds=0.125, exposed_seconds=0.25
            )
        )
        for seconds in landed
    ]


def test_ratios_are_those_within_a_round() -> None:
    """In the second round the whole machine was slower."""
    samples = {
        (64, "layers"): make_granularity_samples(1.5, 3.0, 1.5),
        (64, "whole"): make_granularity_samples(1.0, 2.0, 1.0),
        (64, "adaptive"): make_granularity_samples(0.9, 1.8, 1.1),
    }
    rows = {row.name: row for row in to_rows("zmq", samples, "command")}
    assert rows["granularity/zmq/64/whole_landed"].value == 1000.0
    assert rows["granularity/zmq/64/whole_cost"].value == 375.0
    assert rows["granularity/zmq/64/layers_of_whole"].value == 1.5
    adaptive = rows["granularity/zmq/64/adaptive_of_whole"]
    assert adaptive.value == pytest.approx(0.9)
    assert adaptive.limit == MAX_OF_WHOLE
