"""More than a cluster can take, on real processes whose nodes only pretend to compute: what is
turned away is told so at once, what is taken in is answered right and no slower than the cluster
can, and afterwards all is as before.

`make test` runs each overload for two seconds and judges outcomes; `make soak` for a minute, and
judges time too. On the virtual clock the same is in
tests/unit/coordinator/core/admission/test_overload_simulated.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.cluster import Cluster
from tests.open_loop import OpenLoopOutcome, OpenLoopRequest, check_outcomes, percentile
from tests.soak.conftest import Figures
from tests.soak.overload_run import (
    JUDGED_SECONDS,
    MAX_GROWTH_BYTES,
    MAX_RECOVERY_SECONDS,
    MAX_REFUSAL_SECONDS,
    MAX_TOKEN_GAP_SECONDS,
    OverloadRun,
    format_ms,
    format_percentiles,
    format_send_lag,
    list_ttfts,
    p99,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BATCH_SLOTS = 8  # of decode
MAX_QUEUE = 64
REQUEST = OpenLoopRequest()
SETTINGS: dict[str, Any] = {
    "prefill": 1,
    "decode": 2,
    "max_num_seqs": BATCH_SLOTS // 2,
    "max_batched_tokens": 128,
    "max_queue": MAX_QUEUE,
    "kv_memory": "512KiB",  # 128 blocks
    "paced_prefill_us_per_token": 200.0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def overload(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> AsyncIterator[OverloadRun]:
    seconds = float(request.config.getoption("--storm-seconds"))
    step = 30.0 if seconds >= JUDGED_SECONDS else 10.0  # milliseconds: 14 or 40 requests a second
    folder = tmp_path_factory.mktemp("overload")
    async with Cluster(folder, engine="paced", model="", paced_step_ms=step, **SETTINGS) as cluster:
        made = OverloadRun(cluster, seconds, figures)
        await made.measure_capacity(REQUEST, 2 * BATCH_SLOTS)
        yield made
    cluster.assert_clean()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def idle_afterwards(overload: OverloadRun) -> AsyncIterator[None]:
    yield
    await overload.cluster.wait_idle()


@pytest.mark.parametrize("kind", ["plain", "retries", "deadlines"])
async def test_excess_of_five_times_the_capacity_is_refused_fast(
    overload: OverloadRun, kind: str
) -> None:
    kinds = {
        "retries": replace(REQUEST, max_attempts=4),
        "deadlines": replace(REQUEST, timeout_seconds=max(3.0, 4 * overload.idle_latency_seconds)),
    }
    loop, before = overload.new_open_loop(), overload.measure_memory()
    began = time.monotonic()
    over = loop.closing_time = began + overload.seconds
    offering = asyncio.create_task(
        loop.run_poisson_load(
            kinds.get(kind, REQUEST), 5 * overload.reference_capacity, overload.seconds
        )
    )
    await asyncio.sleep(overload.seconds / 2)
    status = await overload.cluster.get_status()
    await asyncio.sleep(max(0.0, over - time.monotonic()))
    recovery = await overload.measure_recovery(loop, REQUEST, over)
    outcomes = await offering
    await overload.cluster.wait_idle()
    ended = check_outcomes(outcomes, late=kind == "deadlines")
    assert ended["answered"] > 0 or kind == "deadlines"
    overload.check_figure(ended["refused"] > 0, ended)
    assert status.queued <= MAX_QUEUE
    refusals = [seconds for each in outcomes for seconds in each.refusal_seconds]
    goodput = loop.completion_rate(outcomes, began + overload.seconds / 4, over)
    grower, growth = overload.find_largest_growth(before)
    overload.record_figures(
        f"5x for {overload.seconds:g} s, {kind}",
        sent=f"{len(outcomes)} clients, {len(refusals)} refusals",
        ended=", ".join(f"{count} {how}" for how, count in sorted(ended.items())),
        goodput=f"{goodput:.1f}/s, {goodput / overload.reference_capacity:.0%} of capacity",
        refused_within=format_percentiles(refusals),
        TTFT=format_percentiles(list_ttfts(outcomes)),
        clients_own_delay=format_send_lag(outcomes),
        recovery=f"{recovery:.1f} s",
        memory=f"{growth / 2**20:+.1f} MiB ({grower}, which grew most)",
    )
    overload.check_figure(p99(refusals) <= MAX_REFUSAL_SECONDS, refusals)
    overload.check_figure(goodput >= 0.9 * overload.reference_capacity, goodput)
    overload.check_figure(recovery <= MAX_RECOVERY_SECONDS, recovery)
    overload.check_figure(growth <= MAX_GROWTH_BYTES, overload.measure_memory())


async def test_clients_that_retry_at_once_do_not_slow_others(overload: OverloadRun) -> None:
    loop, began = overload.new_open_loop(), time.monotonic()
    over = loop.closing_time = began + overload.seconds
    outcomes = await loop.run_poisson_load(
        replace(REQUEST, max_attempts=8, retry_seconds=0.25),
        3 * overload.reference_capacity,
        overload.seconds,
    )
    ended = check_outcomes(outcomes)
    recovery = await overload.measure_recovery(loop, REQUEST, over)
    goodput = loop.completion_rate(outcomes, began + overload.seconds / 4, over)
    refusals = [seconds for each in outcomes for seconds in each.refusal_seconds]
    overload.record_figures(
        "retry storm, 3x",
        sent=f"{len(outcomes)} clients, {len(refusals)} refusals",
        goodput=f"{goodput:.1f}/s, {goodput / overload.reference_capacity:.0%} of capacity",
        refused_within=format_percentiles(refusals),
        recovery=f"{recovery:.1f} s",
    )
    assert ended["answered"] > 0
    overload.check_figure(goodput >= 0.9 * overload.reference_capacity, goodput)
    overload.check_figure(p99(refusals) <= MAX_REFUSAL_SECONDS, refusals)


async def test_burst_is_served_at_once_or_on_retry(overload: OverloadRun) -> None:
    """All requests are served, at once or when they are retried after the stated delay."""
    loop, count = overload.new_open_loop(), 1000 if overload.is_judged else 120
    began = time.monotonic()
    outcomes = await loop.run_burst(replace(REQUEST, output_tokens=4, max_attempts=count), count)
    took = time.monotonic() - began
    assert check_outcomes(outcomes) == {"answered": count}
    refusals = [seconds for each in outcomes for seconds in each.refusal_seconds]
    overload.record_figures(
        f"{count} at once",
        all_served_after=f"{took:.1f} s, {len(refusals)} refusals",
        longest_silence=f"{loop.longest_token_gap_seconds:.2f} s",
    )
    overload.check_figure(
        loop.longest_token_gap_seconds < MAX_TOKEN_GAP_SECONDS, loop.longest_token_gap_seconds
    )


async def test_huge_request_among_small_ones_is_served(overload: OverloadRun) -> None:
    """It takes 101 of a node's 128 blocks."""
    loop = overload.new_open_loop()
    small = asyncio.create_task(
        loop.run_poisson_load(REQUEST, 0.7 * overload.reference_capacity, overload.seconds)
    )
    await asyncio.sleep(overload.seconds / 4)
    huge = await loop.run_client(replace(REQUEST, prompt_tokens=1600))
    outcomes = await small
    assert huge.is_served, huge.error
    assert set(check_outcomes(outcomes)) == {"answered"}
    small_ttfts = format_percentiles(list_ttfts(outcomes))
    overload.record_figures(
        "101 of 128 blocks",
        TTFT=f"{huge.ttft_seconds:.2f} s, the small ones' {small_ttfts}",
        longest_silence=f"{loop.longest_token_gap_seconds:.2f} s",
    )
    overload.check_figure(
        loop.longest_token_gap_seconds < MAX_TOKEN_GAP_SECONDS, loop.longest_token_gap_seconds
    )


async def test_short_prompts_behind_a_long_one_are_served(overload: OverloadRun) -> None:
    loop, short, long = (
        overload.new_open_loop(),
        replace(REQUEST, prompt_tokens=32, output_tokens=2),
        replace(REQUEST, prompt_tokens=1600, output_tokens=2),
    )

    async def p95(*, behind: bool) -> float:
        first = asyncio.create_task(loop.run_client(long)) if behind else None
        if first is not None:
            await overload.cluster.wait_status(
                lambda status: status.running >= 1
            )  # it has a head start
        outcomes: list[OpenLoopOutcome] = await loop.run_burst(short, 50)
        assert check_outcomes(outcomes) == {"answered": 50}
        if first is not None:
            assert (await first).is_served
        return percentile(list_ttfts(outcomes), 0.95)

    pairs = [
        (await p95(behind=False), await p95(behind=True))
        for _ in range(5 if overload.is_judged else 1)
    ]
    alone, behind = min(alone for alone, _ in pairs), min(behind for _, behind in pairs)
    overload.record_figures(
        "50 short behind a long one",
        TTFT_p95=f"{format_ms(behind)} against {format_ms(alone)} alone, {behind / alone:.2f}x",
    )
    overload.check_figure(behind <= 2 * alone, pairs)


async def test_grpc_refusals_carry_a_retry_delay(overload: OverloadRun) -> None:
    async def refusal() -> grpc.aio.AioRpcError | None:
        try:
            await overload.cluster.generate([1, 2, 3], max_tokens=REQUEST.output_tokens)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    await overload.cluster.arm_failpoints(
        "decode", "decode.step.before=delay(0.5)"
    )  # all have asked before many are answered
    calls = [asyncio.create_task(refusal()) for _ in range(2 * (MAX_QUEUE + BATCH_SLOTS))]
    for ended in asyncio.as_completed(calls):
        if await ended is not None:
            break
    await overload.cluster.arm_failpoints("decode", "")
    refusals = [error for error in await asyncio.gather(*calls) if error is not None]
    assert refusals
    for error in refusals:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata() or ())["retry-after"]) >= 1
