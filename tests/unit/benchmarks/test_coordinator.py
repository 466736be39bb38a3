"""What the coordinator's benchmark makes of what it saw, and whether its nodes serve."""

import asyncio
import os

import pytest

from baton.types import SamplingParams
from benchmarks.clusters.instant_nodes import run_instant_nodes
from benchmarks.coordinator import CoordinatorFigures, to_rows
from benchmarks.figures.process_time import cpu_seconds
from tests.integration.coordinator_harness import collect_stream, running_coordinator
from tests.new_requests import make_request


def test_rows() -> None:
    rows = to_rows(
        "http",
        CoordinatorFigures(
            6000,
            busy_seconds=0.5,
            wall_seconds=2.0,
            ttft_seconds=[0.001, 0.003, 0.009],
            bare_ttft_seconds=[0.001, 0.001],
        ),
        "it",
    )
    assert {row.name: (row.value, row.limit) for row in rows} == {
        "coordinator/http/throughput": (12_000.0, 3000.0),
        "coordinator/http/cost": (pytest.approx(500 / 6), None),
        "coordinator/http/wall": (3000.0, None),
        "coordinator/http/ttft_p50": (3.0, None),
        "coordinator/http/ttft_p99": (pytest.approx(8.88), None),
        "coordinator/http/ttft_bare_p50": (1.0, None),
        "coordinator/http/ttft_added_p50": (2.0, 5.0),
    }


def test_cpu_time_is_this_process_s() -> None:
    own = cpu_seconds(os.getpid())
    times = os.times()
    assert own == pytest.approx(times.user + times.system, abs=0.5)


@pytest.mark.parametrize("step", [0.0, 0.001])
async def test_instant_nodes_serve(step: float) -> None:
    async with running_coordinator() as bench:
        nodes = asyncio.create_task(run_instant_nodes(bench.cluster_port_address, "", 100, step))
        await bench.wait_until(lambda: len(bench.dispatcher.brain.node_registry.nodes) == 2)
        for count in (1, 2, 30):
            requests = [make_request((1, 2, 3), SamplingParams(count), 10.0) for _ in range(3)]
            answers = await asyncio.gather(
                *map(collect_stream, await bench.dispatcher.submit_requests(requests))
            )
            assert [tokens for tokens, _ in answers] == [
                tuple(n * 7 % 100 for n in range(count))
            ] * 3
        assert bench.dispatcher.brain.counters.replaced_attempts == {}
        assert bench.dispatcher.brain.running_requests == 0
        nodes.cancel()
        await asyncio.gather(nodes, return_exceptions=True)
