"""Mode auto against both fixed modes with as many nodes, on a virtual clock.

A request is good within twice the latency of an idle cluster. Auto must have at least nine
tenths of the goodput of the better fixed mode."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Literal

import pytest

from node_engine.paced.costs import PacedCosts
from simulator.scheduler_cluster import SchedulerCluster
from simulator.simulated_request import SimulatedRequest

COSTS = PacedCosts(
    prefill_us_per_token=200.0,
    prefill_us_per_cached_token=0.0,
    decode_base_us=10_000.0,
    decode_us_per_sequence=200.0,
    decode_us_per_context_token=0.2,
)
LINK = 0.005
SECONDS = 15.0
Mode = Literal["disaggregated", "colocated", "auto"]


def cluster(mode: Mode) -> SchedulerCluster:
    if mode == "colocated":
        return SchedulerCluster(nodes=2, costs=COSTS)
    return SchedulerCluster(nodes=1, prefill=1, mode=mode, costs=COSTS, handoff_seconds=LINK)


def is_good(one: SimulatedRequest) -> bool:
    assert one.ended_at is not None
    assert one.first_token_at is not None
    idle, step = one.prompt_tokens * COSTS.prefill_us_per_token * 1e-6, 0.0103
    return (
        one.ttft_seconds <= 2.0 * idle + 0.003
        and (one.ended_at - one.first_token_at) / (one.token_count - 1) <= 2.0 * step
    )


def goodput(
    mode: Mode, prompts: Sequence[int], output: int, rate: float
) -> tuple[float, SchedulerCluster]:
    made, draw, when, number = cluster(mode), random.Random(7), 0.0, 0
    while (when := when + draw.expovariate(rate)) < SECONDS:
        made.call_at(
            when,
            partial(
                made.submit_prompt,
                prompt_tokens=prompts[number % len(prompts)],
                output_tokens=output,
            ),
        )
        number += 1
    made.run(SECONDS + 60.0)
    done = made.completed_requests()
    assert len(done) == number, "everybody is served in the end"
    return sum(map(is_good, done)) / SECONDS, made


@pytest.mark.parametrize(
    ("prompts", "output", "rate"),
    [([128], 64, 12.0), ([128] * 7 + [2048], 64, 5.0), ([1536], 32, 2.5)],
    ids=["short", "mixed", "long"],
)
def test_auto_has_the_goodput_of_the_better_mode(
    prompts: list[int], output: int, rate: float
) -> None:
    fixed = [goodput(mode, prompts, output, rate)[0] for mode in ("disaggregated", "colocated")]
    auto, made = goodput("auto", prompts, output, rate)
    assert auto >= 0.9 * max(fixed), fixed
    ways = {way for way, _ in made.brain.counters.placements}
    assert ways == {"local", "hand_off"}


def test_running_sequences_keep_tpot_under_new_prompts() -> None:
    """The prefill node is overloaded, so that decode nodes compute as many prompts as they
    accept."""
    made = cluster("auto")
    resident = made.submit_prompt(prompt_tokens=64, output_tokens=600)
    made.schedule_poisson_load(4.0, 8.0, start=1.0, prompt_tokens=1536, output_tokens=8)
    made.run(60.0)
    assert resident.ended_at is not None
    assert resident.first_token_at is not None
    pace = (resident.ended_at - resident.first_token_at) / (resident.token_count - 1)
    others = 8 * COSTS.decode_us_per_sequence * 1e-6
    assert pace <= (0.0103 + others) * (1.0 + 0.5) * 1.05
    assert made.brain.counters.placements["local", "sooner"] > 3
