"""More than a small cluster can take: what is turned away is told so at once, what is taken in is
answered right, and service is degraded and restored."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from baton.cli.views.counters import sum_counter
from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.paced_reference import paced_reference_tokens
from tests.steady_load import make_prompt, run_baton

IN_MODULE = pytest.mark.asyncio(loop_scope="module")
CLIENTS = 40
OUTPUT = 8
CAPPED_OUTPUT = OUTPUT  # so that a crowd that takes long enough to come is not cut short


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    settings: dict[str, Any] = {
        "max_queue": 4,
        "max_num_seqs": 2,
        "paced_step_ms": 50.0,
        "slo": "ttft=9s",
        "ratio_auto": True,
    }
    degraded: dict[str, Any] = {"degrade_wait": 0.1, "degraded_max_tokens": CAPPED_OUTPUT}
    made = Cluster(
        tmp_path_factory.mktemp("overload"), engine="paced", model="", **settings, **degraded
    )
    async with made:
        yield made
    made.assert_clean()


@IN_MODULE
async def test_excess_requests_are_answered_or_refused_with_retry_after(cluster: Cluster) -> None:
    prompts = [[1 + number] * 40 for number in range(CLIENTS)]
    async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=60) as client:

        async def ask(prompt: list[int]) -> httpx2.Response:
            body = {"prompt": prompt, "max_tokens": OUTPUT, "return_token_ids": True}
            return await client.post("/v1/completions", json=body)

        await cluster.arm_failpoints(
            "decode", "decode.step.before=delay(0.3)"
        )  # the crowd comes sooner than it is answered
        asked = [asyncio.create_task(ask(each)) for each in prompts]
        for ended in asyncio.as_completed(asked):
            if (await ended).status_code != 200:
                break
        await cluster.arm_failpoints("decode", "")
        answers = await asyncio.gather(*asked)
        outcomes = Counter(answer.status_code for answer in answers)
        assert set(outcomes) == {200, 429}, outcomes
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["token_ids"] == paced_reference_tokens(
                    prompt, OUTPUT
                )
            else:
                assert "the limit is 4 (--max-queue)" in answer.json()["error"]["message"]
                assert int(answer.headers["retry-after"]) >= 1
        metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
        assert (
            f'baton_rejected_total{{class="default",reason="overloaded"}} {outcomes[429]}.0'
            in metrics
        )
        await cluster.wait_idle()
        assert (await ask(prompts[0])).status_code == 200
        await cluster.wait_idle()


def is_degradation_step_taken(status: pb.StatusResponse) -> bool:
    return any(step.active for step in status.degradation if step.step == "capped_output")


@IN_MODULE
async def test_degradation_applies_while_requests_wait_and_is_lifted_after(
    cluster: Cluster,
) -> None:
    """One more than can run at once, each for so long that the one that waits does so until the
    step is taken."""
    long = [
        asyncio.create_task(
            cluster.generate(
                make_prompt(100 * number), max_tokens=4000, ignore_eos=True, deadline=300.0
            )
        )
        for number in range(3)
    ]
    await cluster.wait_status(is_degradation_step_taken, 60.0)
    code, out, _ = await run_baton(cluster, "status")
    assert (code, "capped_output" in out) == (0, True)
    capped = asyncio.create_task(
        cluster.generate(make_prompt(7), max_tokens=50, ignore_eos=True, deadline=300.0)
    )
    await cluster.wait_status(lambda status: status.queued >= 2)
    for each in long:
        each.cancel()
    await asyncio.wait(long)
    answer = await capped
    assert list(answer.tokens) == paced_reference_tokens(make_prompt(7), CAPPED_OUTPUT), (
        "it came while the step was taken"
    )
    restored = await cluster.wait_status(lambda status: not is_degradation_step_taken(status), 60.0)
    for change in ("taken", "taken_back"):
        counted = sum_counter(
            restored.counters,
            "baton_degradation_changes_total",
            step="capped_output",
            change=change,
        )
        assert counted >= 1
    asked = make_prompt(8)
    answer = await cluster.generate(asked, max_tokens=2 * CAPPED_OUTPUT, ignore_eos=True)
    assert list(answer.tokens) == paced_reference_tokens(asked, 2 * CAPPED_OUTPUT)
    await cluster.wait_idle()


@IN_MODULE
async def test_auto_ratio_survives_a_coordinator_restart(cluster: Cluster) -> None:
    await run_baton(cluster, "ratio", "manual")
    assert not (await cluster.get_status()).ratio.automatic
    cluster.kill("coordinator")
    cluster.start("coordinator")
    await cluster.wait_ready()
    status = await cluster.wait_status(lambda status: len(status.nodes) == 2)
    assert (status.ratio.automatic, status.ratio.slo) == (True, "ttft=9000ms")
    await cluster.wait_idle()
