"""Explaining requests and draining nodes on a real cluster under load: nothing is lost, repeated or
wrong."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from baton.cli.checks.ledger import OWNED_STATES
from baton.cli.views.counters import sum_counter
from baton.pb import cluster_pb2 as pb
from baton.pb.common_pb2 import HandoffReport
from node_engine.paced.paced_engine import PACED_LAYOUT
from tests.cluster import Cluster
from tests.cluster_metrics import read_metric
from tests.grpc_calls import GenerateAnswer, call_cluster_service
from tests.paced_reference import paced_reference_tokens
from tests.steady_load import make_prompt, run_baton, steady_load

IN_MODULE = pytest.mark.asyncio(loop_scope="module")
STAGES = ("queue", "reserve", "prefill", "transfer", "first_token")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    settings: dict[str, Any] = {
        "paced_prefill_us_per_token": 300.0,
        "paced_step_ms": 10.0,
        "heartbeat": 0.1,
        "layers_per_message": 1,
    }
    made = Cluster(
        tmp_path_factory.mktemp("drain"), engine="paced", prefill=2, decode=2, **settings
    )
    async with made:
        yield made
    made.assert_clean()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def at_rest(cluster: Cluster) -> AsyncIterator[None]:
    yield
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        await call_cluster_service(cluster.grpc_address, "Undrain", pb.UndrainRequest(node=name))
    await cluster.wait_idle()


async def explain_request(cluster: Cluster, request: str) -> pb.ExplainResponse:
    told: pb.ExplainResponse = await call_cluster_service(
        cluster.grpc_address, "Explain", pb.ExplainRequest(request_id=request)
    )
    return told


async def read_counter(cluster: Cluster, name: str, **labels: str) -> float:
    return sum_counter((await cluster.get_status()).counters, name, **labels)


async def ttft_sum(cluster: Cluster) -> float:
    """What the coordinator has measured as times to first token, added up, without any stage."""
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"{cluster.admin_url}/metrics")).text
    found = re.search(
        r'^baton_request_ttft_seconds_sum\{class="default"\} (\S+)$', text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


async def slowed_seconds(cluster: Cluster) -> float:
    """By how much hand-offs have slowed the prefill nodes, as last reported."""
    name = "baton_prefill_slowed_seconds_total"
    nodes = ("prefill-0", "prefill-1")
    return sum([await read_metric(cluster, f'{name}{{node="{node}"}}') for node in nodes])


async def find_handoff(cluster: Cluster, answer: GenerateAnswer) -> HandoffReport:
    return (await explain_request(cluster, answer.request_id)).timeline.handoff


async def find_serving_nodes(cluster: Cluster, answer: GenerateAnswer) -> set[str]:
    attempts = (await explain_request(cluster, answer.request_id)).attempts
    return {attempts[-1].prefill_node, attempts[-1].decode_node}


async def check_node_is_empty(cluster: Cluster, name: str) -> None:
    ledgers = {ledger.node: ledger for ledger in (await cluster.get_ledgers()).ledgers}
    assert [owner for owner in ledgers[name].owners if owner.state in OWNED_STATES] == []


@IN_MODULE
@pytest.mark.parametrize(
    "fault", ["", "decode.commit.before=error*1"], ids=["served", "placed again"]
)
async def test_explain_stages_add_up_to_ttft(cluster: Cluster, fault: str) -> None:
    await cluster.arm_failpoints("decode", fault)
    before, asked = await ttft_sum(cluster), make_prompt(len(fault), 300)
    began, seen = time.monotonic(), 0.0
    async with cluster.stream_generate(asked, max_tokens=8, ignore_eos=True) as call:
        request, tokens = "", list[int]()
        async for message in call:
            seen = seen or time.monotonic() - began
            request = message.request_id
            tokens += message.token_ids
    await cluster.arm_failpoints("decode", "")
    assert tokens == paced_reference_tokens(asked, 8)
    ttft = await ttft_sum(cluster) - before
    async with asyncio.timeout(60):  # prefill's report of the hand-off may come after the end
        while not (told := await explain_request(cluster, request)).attempts[-1].handoff.bytes:
            await asyncio.sleep(0.05)
    stages = [getattr(told.timeline, stage) for stage in STAGES]
    assert sum(stages) == pytest.approx(ttft, rel=0.02)
    assert all(stage >= 0 for stage in stages)
    assert sum(stages) <= seen
    assert told.timeline.total == pytest.approx(told.timeline.ttft + told.decode, rel=0.02)
    *lost, last = told.attempts
    assert (bool(lost), last.ended) == (bool(fault), "served")
    assert all(attempt.ended not in ("", "served") and attempt.reason for attempt in lost), lost
    assert told.timeline.queue == pytest.approx(last.placed)  # attempts that were lost are waiting
    sources = told.sources
    assert (
        sources.computed_prefill + sources.computed_decode + sources.local_cache + sources.pool
        == len(asked)
    )
    assert told.attempts[-1].handoff == told.timeline.handoff


@IN_MODULE
async def test_explain_says_by_how_much_a_slow_hand_off_slowed_the_prefill(
    cluster: Cluster,
) -> None:
    """Each message takes 50 ms. A prefill that waits for its layers to land is slowed by that; of
    one that does not wait the transfer is exposed instead."""
    slow_write, wait = "transfer.write.before=delay(0.05)", "prefill.layer.landed=delay(30)"
    reports = []
    for number, faults in enumerate((f"{slow_write};{wait}", slow_write)):
        before = await slowed_seconds(cluster)
        await cluster.arm_failpoints("prefill", faults)
        prompt = make_prompt(40 + number, 300)
        answer = await cluster.generate(prompt, max_tokens=8, ignore_eos=True)
        await cluster.arm_failpoints("prefill", "")
        async with asyncio.timeout(60):
            while not (report := await find_handoff(cluster, answer)).bytes:
                await asyncio.sleep(0.05)
            # A heartbeat brings the counter.
            while await slowed_seconds(cluster) - before < report.slowed_seconds * 0.999:
                await asyncio.sleep(0.05)
        assert report.group_layers == 1  # --layers-per-message
        reports.append(report)
    waited, streamed = reports
    messages = PACED_LAYOUT.num_layers  # at least one for each layer
    assert messages * 0.05 <= waited.slowed_seconds <= waited.compute_seconds
    assert streamed.exposed_seconds >= 0.05
    assert streamed.slowed_seconds > 0.0  # announcing alone
    code, out, err = await run_baton(cluster, "explain", answer.request_id)
    assert (code, err) == (0, "")
    assert f"slowed by {streamed.slowed_seconds * 1e3:.1f} ms" in out


@IN_MODULE
async def test_explain_on_the_command_line(cluster: Cluster) -> None:
    answer = await cluster.generate(make_prompt(7), max_tokens=5, ignore_eos=True)
    code, out, err = await run_baton(cluster, "explain", answer.request_id)
    assert (code, err) == (0, "")
    assert f"request {answer.request_id}: finished (length)" in out
    assert "chosen" in out
    code, out, _ = await run_baton(cluster, "explain", answer.request_id, "--json")
    assert (code, json.loads(out)["output_tokens"]) == (0, 5)
    async with httpx2.AsyncClient() as client:
        by_http = await client.get(f"{cluster.admin_url}/admin/explain/{answer.request_id}")
    assert by_http.json()["attempts"][0]["ended"] == "served"
    code, out, err = await run_baton(cluster, "explain", "nobody")
    assert (code, out) == (1, "")
    assert "there is no request 'nobody'" in err


@IN_MODULE
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_drain_under_load_finishes_requests_on_the_node(cluster: Cluster, role: str) -> None:
    failed = await read_counter(cluster, "baton_replaced_total")
    async with steady_load(cluster) as answers:
        code, out, err = await run_baton(cluster, "drain", f"{role}-0")
        assert (code, out) == (0, f"{role}-0 is drained: nothing is left there\n"), err
        await check_node_is_empty(cluster, f"{role}-0")
        answers.clear()
        await cluster.wait_status(lambda _: len(answers) >= 6)
    assert await read_counter(cluster, "baton_replaced_total") == failed
    assert f"{role}-0" not in await find_serving_nodes(cluster, answers[-1])


@IN_MODULE
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_drain_timeout_moves_remaining_requests_to_other_nodes(
    cluster: Cluster, role: str
) -> None:
    before = [
        await read_counter(cluster, "baton_replaced_total", **only)
        for only in ({}, {"reason": "drained"})
    ]
    long = make_prompt(3, 2000)
    async with steady_load(cluster, tokens=100):
        await cluster.arm_failpoints(
            role, f"{role}.{'step' if role == 'decode' else 'layer'}.before=delay(0.2)"
        )  # it is not done
        for_long = asyncio.create_task(cluster.generate(long, max_tokens=100, ignore_eos=True))
        await cluster.wait_status(
            lambda status: all(one.placed for one in status.nodes if one.role == role)
        )
        code, _, err = await run_baton(cluster, "drain", f"{role}-0", "--timeout", "0")
        await cluster.arm_failpoints(role, "")
        assert code == 0, err
        await check_node_is_empty(cluster, f"{role}-0")
        assert list((await for_long).tokens) == paced_reference_tokens(long, 100)
    drained = await read_counter(cluster, "baton_replaced_total", reason="drained") - before[1]
    assert (
        await read_counter(cluster, "baton_replaced_total") - before[0] == drained > 0
        or role == "prefill"
    )


@IN_MODULE
async def test_restarted_drained_node_stays_drained_until_undrain(cluster: Cluster) -> None:
    assert (await run_baton(cluster, "drain", "decode-1"))[0] == 0
    cluster.kill("decode-1")
    await cluster.wait_status(lambda status: len(status.nodes) == 3)
    cluster.start("decode-1")
    status = await cluster.wait_status(lambda status: len(status.nodes) == 4)
    assert {node.name: node.service != "in" for node in status.nodes}["decode-1"]
    answers = [await cluster.generate(make_prompt(number), max_tokens=3) for number in range(4)]
    assert {
        (await explain_request(cluster, answer.request_id)).attempts[-1].decode_node
        for answer in answers
    } == {"decode-0"}
    assert (await run_baton(cluster, "undrain", "decode-1"))[1] == "decode-1 is in service\n"
    async with steady_load(cluster) as answers:
        await cluster.wait_status(
            lambda status: all(node.placed for node in status.nodes if node.role == "decode")
        )


@IN_MODULE
async def test_draining_the_last_prefill_node_moves_prefill_to_decode_nodes(
    cluster: Cluster,
) -> None:
    assert (await run_baton(cluster, "drain", "prefill-1", "--no-wait"))[2] == ""
    asked = make_prompt(11, 6000)
    await cluster.arm_failpoints(
        "prefill", "prefill.layer.before=delay(0.2)"
    )  # it is not done before it is drained
    waiting = asyncio.create_task(cluster.generate(asked, max_tokens=4, ignore_eos=True))
    await cluster.wait_status(
        lambda status: any(one.placed for one in status.nodes if one.name == "prefill-0")
    )
    request = pb.DrainRequest(node="prefill-0", timeout_seconds=0)
    answer = await call_cluster_service(cluster.grpc_address, "Drain", request)
    assert answer.warning == (
        "there is no prefill node but drained ones (prefill-0, prefill-1): "
        "decode nodes compute every prompt until one serves"
    )
    served = await waiting
    assert list(served.tokens) == paced_reference_tokens(asked, 4)
    told = await call_cluster_service(
        cluster.grpc_address, "Explain", pb.ExplainRequest(request_id=served.request_id)
    )
    assert (told.attempts[-1].way, told.attempts[-1].why) == ("local", "no_prefill_node")
    code, out, _ = await run_baton(cluster, "status", "--json")
    assert (code, json.loads(out)["notices"]) == (
        0,
        ["no prefill node serves: decode nodes compute every prompt"],
    )
    await cluster.arm_failpoints("prefill", "")
    await run_baton(cluster, "undrain", "prefill-0")
    assert (await cluster.get_status()).ready


@IN_MODULE
async def test_top_on_the_command_line(cluster: Cluster) -> None:
    async with steady_load(cluster, tokens=100):
        code, out, err = await run_baton(cluster, "top", "--once", "--interval", "0.5", "--json")
    assert (code, err) == (0, "")
    seen = json.loads(out)
    assert seen["rates"]["tokens"] > 0
    assert {node["service"] for node in seen["nodes"]} == {"in"}
