"""More than a small cluster can take: what is turned away is told so at once, what is taken in is answered right, and
service is degraded and restored."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from baton.cli.top_view import total
from baton.pb import cluster_pb2 as pb
from node_engine.paced import paced_reference
from tests.cluster import Cluster
from tests.load import baton, prompt

IN_MODULE = pytest.mark.asyncio(loop_scope="module")
CROWD = 40
OUTPUT = 8
CAPPED = OUTPUT  # so that a crowd that takes long enough to come is not cut short


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    settings = {"max_queue": 4, "max_num_seqs": 2, "paced_step_ms": 50.0, "slo": "ttft=9s", "ratio_auto": True}
    degraded = {"degrade_wait": 0.1, "degraded_max_tokens": CAPPED}
    made = Cluster(tmp_path_factory.mktemp("overload"), engine="paced", model="", **settings, **degraded)
    async with made:
        yield made
    made.assert_clean()


@IN_MODULE
async def test_a_crowd_is_answered_or_told_when_to_come_back(cluster: Cluster) -> None:
    prompts = [[1 + number] * 40 for number in range(CROWD)]
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:

        async def ask(prompt: list[int]) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": OUTPUT, "return_token_ids": True}
            return await client.post("/v1/completions", json=body)

        await cluster.arm("decode", "decode.step.before=delay(0.3)")  # the crowd comes sooner than it is answered
        asked = [asyncio.create_task(ask(each)) for each in prompts]
        for ended in asyncio.as_completed(asked):
            if (await ended).status_code != 200:
                break
        await cluster.arm("decode", "")
        answers = await asyncio.gather(*asked)
        outcomes = Counter(answer.status_code for answer in answers)
        assert set(outcomes) == {200, 429}, outcomes
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["token_ids"] == paced_reference(prompt, OUTPUT)
            else:
                assert "the limit is 4 (--max-queue)" in answer.json()["error"]["message"]
                assert int(answer.headers["retry-after"]) >= 1
        metrics = (await client.get(f"{cluster.admin}/metrics")).text
        assert f'baton_rejected_total{{class="default",reason="overloaded"}} {outcomes[429]}.0' in metrics
        await cluster.wait_quiet()
        assert (await ask(prompts[0])).status_code == 200
        await cluster.wait_quiet()


def is_taken(status: pb.StatusResponse) -> bool:
    return any(step.active for step in status.degradation if step.step == "capped_output")


@IN_MODULE
async def test_service_is_degraded_while_requests_wait_and_restored_when_none_does(cluster: Cluster) -> None:
    """One more than can run at once, each for so long that the one that waits does so until the step is taken."""
    long = [
        asyncio.create_task(cluster.generate(prompt(100 * number), max_tokens=4000, ignore_eos=True, deadline=300.0))
        for number in range(3)
    ]
    await cluster.wait_status(is_taken, 60.0)
    code, out, _ = await baton(cluster, "status")
    assert (code, "capped_output" in out) == (0, True)
    capped = asyncio.create_task(cluster.generate(prompt(7), max_tokens=50, ignore_eos=True, deadline=300.0))
    await cluster.wait_status(lambda status: status.queued >= 2)
    for each in long:
        each.cancel()
    await asyncio.wait(long)
    answer = await capped
    assert list(answer.tokens) == paced_reference(prompt(7), CAPPED), "it came while the step was taken"
    restored = await cluster.wait_status(lambda status: not is_taken(status), 60.0)
    for change in ("taken", "taken_back"):
        counted = total(restored.counters, "baton_degradation_changes_total", step="capped_output", change=change)
        assert counted >= 1
    asked = prompt(8)
    answer = await cluster.generate(asked, max_tokens=2 * CAPPED, ignore_eos=True)
    assert list(answer.tokens) == paced_reference(asked, 2 * CAPPED)
    await cluster.wait_quiet()


@IN_MODULE
async def test_a_coordinator_that_is_to_keep_the_ratio_by_itself_does_so_after_a_restart(cluster: Cluster) -> None:
    await baton(cluster, "ratio", "manual")
    assert not (await cluster.status()).ratio.automatic
    cluster.kill("coordinator")
    cluster.start("coordinator")
    await cluster.ready()
    status = await cluster.wait_status(lambda status: len(status.nodes) == 2)
    assert (status.ratio.automatic, status.ratio.slo) == (True, "ttft=9000ms")
    await cluster.wait_quiet()
