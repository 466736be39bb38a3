"""More than a cluster can take, on real processes whose nodes only pretend to compute: what is turned away is told so
at once, what is taken in is answered right and no slower than the cluster can, and afterwards all is as before.

`make test` plays each storm for two seconds and judges outcomes; `make soak` for a minute, and judges time too. On the
virtual clock the same is in tests/unit/coordinator_core/test_fairness_simulated.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio

from tests.cluster import Cluster
from tests.open_loop import Ask, Outcome, held_to
from tests.soak.conftest import Figures
from tests.soak.storm import GROWTH, JUDGED, RECOVERY, REFUSAL, SILENCE, Storm, lag, ms, p99, spread, ttfts
from tests.virtual_cluster import percentile

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLACES = 8  # of decode
QUEUE = 64
ASK = Ask()
SETTINGS = {
    "prefill": 1,
    "decode": 2,
    "max_num_seqs": PLACES // 2,
    "max_batched_tokens": 128,
    "max_queue": QUEUE,
    "kv_memory": "512KiB",  # 128 blocks
    "paced_prefill_us_per_token": 200.0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def storm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> AsyncIterator[Storm]:
    seconds = float(request.config.getoption("--storm-seconds"))
    step = 30.0 if seconds >= JUDGED else 10.0  # milliseconds: 14 or 40 requests a second
    folder = tmp_path_factory.mktemp("overload")
    async with Cluster(folder, engine="paced", model="", paced_step_ms=step, **SETTINGS) as cluster:
        made = Storm(cluster, seconds, figures)
        await made.measure(ASK, 2 * PLACES)
        yield made
    cluster.assert_clean()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def at_rest(storm: Storm) -> AsyncIterator[None]:
    yield
    await storm.cluster.wait_quiet()


@pytest.mark.parametrize("kind", ["plain", "retries", "deadlines"])
async def test_five_times_the_capacity(storm: Storm, kind: str) -> None:
    kinds = {"retries": replace(ASK, tries=4), "deadlines": replace(ASK, timeout=max(3.0, 4 * storm.service))}
    loop, before = storm.loop(), storm.memory()
    began = time.monotonic()
    over = loop.closing = began + storm.seconds
    offering = asyncio.create_task(loop.offer(kinds.get(kind, ASK), 5 * storm.scale, storm.seconds))
    await asyncio.sleep(storm.seconds / 2)
    status = await storm.cluster.status()
    await asyncio.sleep(max(0.0, over - time.monotonic()))
    recovery = await storm.recovery(loop, ASK, over)
    outcomes = await offering
    await storm.cluster.wait_quiet()
    ended = held_to(outcomes, late=kind == "deadlines")
    assert ended["answered"] > 0 or kind == "deadlines"
    storm.judge(ended["refused"] > 0, ended)
    assert status.queued <= QUEUE
    refusals = [seconds for each in outcomes for seconds in each.refusals]
    goodput = loop.rate(outcomes, began + storm.seconds / 4, over)
    grower, growth = storm.grown(before)
    storm.note(
        f"5x for {storm.seconds:g} s, {kind}",
        sent=f"{len(outcomes)} clients, {len(refusals)} refusals",
        ended=", ".join(f"{count} {how}" for how, count in sorted(ended.items())),
        goodput=f"{goodput:.1f} requests/s, {goodput / storm.scale:.0%} of capacity",
        refused_within=spread(refusals),
        TTFT=spread(ttfts(outcomes)),
        clients_own_delay=lag(outcomes),
        recovery=f"{recovery:.1f} s",
        memory=f"{growth / 2**20:+.1f} MiB ({grower}, which grew most)",
    )
    storm.judge(p99(refusals) <= REFUSAL, refusals)
    storm.judge(goodput >= 0.9 * storm.scale, goodput)
    storm.judge(recovery <= RECOVERY, recovery)
    storm.judge(growth <= GROWTH, storm.memory())


async def test_clients_that_come_back_at_once(storm: Storm) -> None:
    loop, began = storm.loop(), time.monotonic()
    over = loop.closing = began + storm.seconds
    outcomes = await loop.offer(replace(ASK, tries=8, impatience=0.25), 3 * storm.scale, storm.seconds)
    ended = held_to(outcomes)
    recovery = await storm.recovery(loop, ASK, over)
    goodput = loop.rate(outcomes, began + storm.seconds / 4, over)
    refusals = [seconds for each in outcomes for seconds in each.refusals]
    storm.note(
        "retry storm, 3x",
        sent=f"{len(outcomes)} clients, {len(refusals)} refusals",
        goodput=f"{goodput:.1f} requests/s, {goodput / storm.scale:.0%} of capacity",
        refused_within=spread(refusals),
        recovery=f"{recovery:.1f} s",
    )
    assert ended["answered"] > 0
    storm.judge(goodput >= 0.9 * storm.scale, goodput)
    storm.judge(p99(refusals) <= REFUSAL, refusals)


async def test_a_herd_at_once(storm: Storm) -> None:
    """All of them are served: at once, or when they come back as they were told."""
    loop, count = storm.loop(), 1000 if storm.judged else 120
    began = time.monotonic()
    outcomes = await loop.at_once(replace(ASK, output=4, tries=count), count)
    took = time.monotonic() - began
    assert held_to(outcomes) == {"answered": count}
    refusals = [seconds for each in outcomes for seconds in each.refusals]
    storm.note(
        f"{count} at once",
        all_served_after=f"{took:.1f} s, {len(refusals)} refusals",
        longest_silence=f"{loop.longest_silence:.2f} s",
    )
    storm.judge(loop.longest_silence < SILENCE, loop.longest_silence)


async def test_one_huge_request_among_small_ones(storm: Storm) -> None:
    """It takes 101 of a node's 128 blocks."""
    loop = storm.loop()
    small = asyncio.create_task(loop.offer(ASK, 0.7 * storm.scale, storm.seconds))
    await asyncio.sleep(storm.seconds / 4)
    huge = await loop.ask(replace(ASK, prompt=1600))
    outcomes = await small
    assert huge.served, huge.error
    assert set(held_to(outcomes)) == {"answered"}
    storm.note(
        "101 of 128 blocks",
        TTFT=f"{huge.ttft:.2f} s, the small ones' {spread(ttfts(outcomes))}",
        longest_silence=f"{loop.longest_silence:.2f} s",
    )
    storm.judge(loop.longest_silence < SILENCE, loop.longest_silence)


async def test_short_prompts_behind_a_long_one(storm: Storm) -> None:
    loop, short, long = storm.loop(), replace(ASK, prompt=32, output=2), replace(ASK, prompt=1600, output=2)

    async def p95(*, behind: bool) -> float:
        first = asyncio.create_task(loop.ask(long)) if behind else None
        if first is not None:
            await storm.cluster.wait_status(lambda status: status.running >= 1)  # it has a head start
        outcomes: list[Outcome] = await loop.at_once(short, 50)
        assert held_to(outcomes) == {"answered": 50}
        if first is not None:
            assert (await first).served
        return percentile(ttfts(outcomes), 0.95)

    pairs = [(await p95(behind=False), await p95(behind=True)) for _ in range(5 if storm.judged else 1)]
    alone, behind = min(alone for alone, _ in pairs), min(behind for _, behind in pairs)
    storm.note("50 short behind a long one", TTFT_p95=f"{ms(behind)} against {ms(alone)} alone, {behind / alone:.2f}x")
    storm.judge(behind <= 2 * alone, pairs)


async def test_refusals_over_grpc_say_when_to_come_back(storm: Storm) -> None:
    async def refusal() -> grpc.aio.AioRpcError | None:
        try:
            await storm.cluster.generate([1, 2, 3], max_tokens=ASK.output)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    await storm.cluster.arm("decode", "decode.step.before=delay(0.5)")  # all have asked before many are answered
    calls = [asyncio.create_task(refusal()) for _ in range(2 * (QUEUE + PLACES))]
    for ended in asyncio.as_completed(calls):
        if await ended is not None:
            break
    await storm.cluster.arm("decode", "")
    refusals = [error for error in await asyncio.gather(*calls) if error is not None]
    assert refusals
    for error in refusals:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata() or ())["retry-after"]) >= 1
