"""How many layers are handed over together, against a pipeline that is simulated step by step."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.core.layer_groups import LayeredStep, choose_group_layers
from kv_transfer.core.link_costs import LinkCost

MIB = 1 << 20
# 24 layers of 1 MiB, each computed in 2 ms and landed in 0.5 ms
STEP = LayeredStep(24, MIB, 0.002, 0.00001)
LINK = LinkCost(0.0001, 0.0004 / MIB)

seconds = st.floats(0.0, 1.0)
steps = st.builds(LayeredStep, st.integers(1, 96), st.integers(0, 1 << 26), seconds, seconds)
links = st.builds(LinkCost, seconds, st.floats(0.0, 1e-6), st.just(MIB))


def simulate(step: LayeredStep, link: LinkCost, group: int) -> float:
    """When the last group has landed: the link takes one group after the other, as announced."""
    now = landed = 0.0
    for first in range(0, step.num_layers, group):
        layers = min(group, step.num_layers - first)
        now += layers * step.layer_seconds + step.announce_seconds
        landed = max(landed, now) + link.transfer_seconds(layers, step.layer_bytes)
    return max(now, landed)


@given(steps, links, st.integers(1, 96))
def test_prediction_is_that_of_a_simulated_pipeline(
    step: LayeredStep, link: LinkCost, group: int
) -> None:
    group = min(group, step.num_layers)
    predicted, simulated = step.predict_seconds(group, link), simulate(step, link, group)
    assert math.isclose(predicted, simulated, rel_tol=1e-9, abs_tol=1e-12)


@given(steps, links, seconds)
def test_choice_is_never_predicted_to_be_slower_than_whole(
    step: LayeredStep, link: LinkCost, slack: float
) -> None:
    step = replace(step, slack_seconds=slack)
    chosen = choose_group_layers(step, link)
    assert 1 <= chosen <= step.num_layers
    whole = step.predict_seconds(step.num_layers, link)
    assert step.predict_seconds(chosen, link) <= whole


def test_long_layers_on_a_fast_link_go_one_by_one() -> None:
    assert choose_group_layers(STEP, LINK) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_seconds": 0.00001, "layer_bytes": 4096},  # short layers do not pay a message
        {"announce_seconds": 0.02},  # announcing slows the step more than it hides
        {"slack_seconds": 0.1},  # later steps hide the transfer
        {"layer_bytes": 0},  # everything was handed over before
    ],
    ids=str,
)
def test_steps_that_gain_nothing_go_whole(changed: dict[str, float]) -> None:
    assert choose_group_layers(replace(STEP, **changed), LINK) == 24  # type: ignore[arg-type]


def test_between_both_several_layers_share_a_message() -> None:
    """A message costs more than a layer, and a whole step exposes all of it."""
    step = LayeredStep(24, 16384, 0.0005, 0.00005)
    chosen = choose_group_layers(step, LinkCost(0.001, 0.02 / MIB))
    assert chosen in (2, 4, 8)


def test_a_layer_larger_than_a_message_costs_several() -> None:
    link = LinkCost(1.0, 0.0, MIB)
    assert link.transfer_seconds(2, 3 * MIB) == 6.0
    assert link.transfer_seconds(8, MIB // 4) == 2.0
    assert link.transfer_seconds(3, 0) == 0.0
