"""Mode auto on real processes, and what every mode does while the nodes of a role are away. The
paced engine checks every token, whoever computed the prompt."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from baton.cli.views.counters import sum_counter
from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, call_cluster_service
from tests.paced_reference import paced_reference_tokens

PREFILL_SHARE = 0.25
SETTINGS: dict[str, Any] = {
    "engine": "paced",
    "prefill": 1,
    "decode": 1,
    "mode": "auto",
    "heartbeat": 0.1,
    "paced_step_ms": 4.0,
    "paced_prefill_us_per_token": 100.0,
    "local_prefill_share": PREFILL_SHARE,
    "block_size": 16,
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path, **SETTINGS)
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


def prompt(length: int, salt: int) -> list[int]:
    return [1 + (salt * 7919 + 31 * place) % 31000 for place in range(length)]


async def send_request(cluster: Cluster, length: int, salt: int, tokens: int = 8) -> GenerateAnswer:
    answer = await cluster.generate(prompt(length, salt), max_tokens=tokens, ignore_eos=True)
    assert list(answer.tokens) == paced_reference_tokens(prompt(length, salt), tokens)
    return answer


async def explain(cluster: Cluster, answer: GenerateAnswer) -> pb.AttemptReport:
    request = pb.ExplainRequest(request_id=answer.request_id)
    told: pb.ExplainResponse = await call_cluster_service(cluster.grpc_address, "Explain", request)
    return told.attempts[-1]


async def check_refused(cluster: Cluster) -> None:
    """503 with Retry-After, after a second and not before; the same over gRPC."""
    began = time.monotonic()
    body = {"prompt": prompt(20, 99), "max_tokens": 2}
    async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=30) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert time.monotonic() - began >= 1.0
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await cluster.generate(prompt(20, 99), max_tokens=2)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_cluster_serves_without_one_role_where_the_mode_allows(cluster: Cluster) -> None:
    answer = await send_request(cluster, 200, 1)
    attempt = await explain(cluster, answer)
    assert attempt.why == "sooner"
    assert attempt.HasField("other_way"), "both were predicted"

    # no prefill node: decode computes every prompt, beside a stream that goes on, and says so
    resident = asyncio.create_task(send_request(cluster, 30, 2, tokens=400))
    cluster.kill("prefill-0")
    status = await cluster.wait_status(lambda status: len(status.nodes) == 1)
    assert status.ready
    assert status.notices == ["no prefill node serves: decode nodes compute every prompt"]
    computed = status.counters['baton_prompt_tokens_total{source="computed_decode"}']
    for number in range(3):
        attempt = await explain(cluster, await send_request(cluster, 300, 10 + number))
        assert (attempt.way, attempt.why, attempt.prefill_node) == ("local", "no_prefill_node", "")
    status = await cluster.get_status()
    assert status.counters['baton_prompt_tokens_total{source="computed_decode"}'] - computed >= 900
    assert status.counters['baton_placements_total{way="local",why="no_prefill_node"}'] >= 3
    async with httpx2.AsyncClient() as client:
        assert (
            "\nbaton_local_prefill_only 1.0\n"
            in (await client.get(f"{cluster.admin_url}/metrics")).text
        )
    await resident

    # it comes back, and so does the choice
    cluster.start("prefill-0")
    await cluster.wait_status(lambda status: len(status.nodes) == 2 and not status.notices)
    assert (await explain(cluster, await send_request(cluster, 200, 20))).HasField("other_way")

    # no decode node: what was admitted waits, new requests are refused, and service comes back with
    # the node
    await cluster.arm_failpoints(
        "decode-0", "decode.step.before=delay(0.1)"
    )  # it is not done when its node dies
    admitted = asyncio.create_task(send_request(cluster, 40, 30, tokens=400))
    await cluster.wait_status(lambda status: status.running == 1)
    cluster.kill("decode-0")
    await cluster.wait_status(lambda status: len(status.nodes) == 1)
    await check_refused(cluster)
    assert not admitted.done()
    cluster.start("decode-0")
    await admitted
    await cluster.wait_status(lambda status: status.ready)
    await send_request(cluster, 50, 31)


async def send_requests_until(
    cluster: Cluster, enough: asyncio.Event, salt: int, answers: list[GenerateAnswer]
) -> None:
    """One client that asks again and again; a request that is refused or fails raises."""
    while not enough.is_set():
        answers.append(await send_request(cluster, 50, salt + len(answers)))


@pytest.mark.asyncio
async def test_disaggregated_mode_serves_without_its_only_prefill_node(tmp_path: Path) -> None:
    """It is killed under load: nobody is refused, every token is right, and hand-offs resume when
    it is back."""
    made = Cluster(tmp_path, **{**SETTINGS, "mode": "disaggregated"})
    async with made as cluster:
        await cluster.arm_failpoints(
            "prefill-0", "prefill.layer.before=delay(0.2)"
        )  # it is not done when its node dies
        admitted = asyncio.create_task(send_request(cluster, 8000, 1))
        enough, answers = asyncio.Event(), list[GenerateAnswer]()
        load = [
            asyncio.create_task(send_requests_until(cluster, enough, 100, answers))
            for _ in range(3)
        ]
        await cluster.wait_status(lambda status: status.running == 4)
        cluster.kill("prefill-0")
        status = await cluster.wait_status(lambda status: len(status.nodes) == 1)
        assert (status.ready, list(status.notices)) == (
            True,
            ["no prefill node serves: decode nodes compute every prompt"],
        )
        attempt = await explain(cluster, await send_request(cluster, 300, 10))
        assert (attempt.way, attempt.why, attempt.prefill_node) == ("local", "no_prefill_node", "")
        assert (await explain(cluster, await admitted)).why == "no_prefill_node"
        async with httpx2.AsyncClient() as client:
            metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
        assert "\nbaton_local_prefill_only 1.0\n" in metrics
        assert 'baton_placements_total{way="local",why="no_prefill_node"}' in metrics

        committed = sum_counter(status.counters, "baton_handoffs_total", outcome="committed")
        cluster.start("prefill-0")
        status = await cluster.wait_status(
            lambda status: (
                sum_counter(status.counters, "baton_handoffs_total", outcome="committed")
                > committed
            )
        )
        assert status.notices == []
        enough.set()
        await asyncio.gather(*load)
        attempt = await explain(cluster, await send_request(cluster, 50, 2))
        assert (attempt.way, attempt.why) == ("hand_off", "mode")
        await cluster.wait_idle()
    made.assert_clean()
