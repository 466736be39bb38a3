"""The ratio of a real cluster, changed while traffic flows: nothing fails, nothing is wrong, the
caches stay."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from baton.cli.views.counters import sum_counter
from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.grpc_calls import call_cluster_service
from tests.paced_reference import paced_reference_tokens
from tests.steady_load import make_prompt, run_baton, steady_load

IN_MODULE = pytest.mark.asyncio(loop_scope="module")
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    settings: dict[str, Any] = {
        "paced_prefill_us_per_token": 300.0,
        "paced_step_ms": 10.0,
        "heartbeat": 0.1,
        "paced_reread": True,
    }
    folder = tmp_path_factory.mktemp("ratio")
    made = Cluster(folder, engine="paced", prefill=2, decode=2, flip_timeout=1.0, **settings)
    async with made:
        yield made
    made.assert_clean()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def as_at_first(cluster: Cluster) -> AsyncIterator[None]:
    """Every test begins with a fresh coordinator's view: all in service, two of each role, nothing
    held."""
    yield
    for name in NODES:
        await call_cluster_service(cluster.grpc_address, "Undrain", pb.UndrainRequest(node=name))
    await change_ratio(cluster, 2, 2)
    await cluster.wait_idle()


async def set_ratio(cluster: Cluster, prefill: int, decode: int, **fields: float) -> None:
    await call_cluster_service(
        cluster.grpc_address,
        "SetRatio",
        pb.SetRatioRequest(prefill=prefill, decode=decode, **fields),
    )


async def wait_ratio_reached(cluster: Cluster, prefill: int, decode: int) -> pb.StatusResponse:
    def holds(status: pb.StatusResponse) -> bool:
        return status.ratio.settled and (status.ratio.prefill, status.ratio.decode) == (
            prefill,
            decode,
        )

    return await cluster.wait_status(holds)


async def change_ratio(cluster: Cluster, prefill: int, decode: int) -> pb.StatusResponse:
    await set_ratio(cluster, prefill, decode)
    return await wait_ratio_reached(cluster, prefill, decode)


def roles_by_node(status: pb.StatusResponse) -> dict[str, str]:
    return {node.name: node.role for node in status.nodes}


async def wait_switching_node(cluster: Cluster, phase: str) -> str:
    """The node that is in that phase of its switch, as soon as one is."""
    found = await cluster.wait_status(
        lambda status: any(each.phase == phase for each in status.ratio.switches)
    )
    return next(str(each.node) for each in found.ratio.switches if each.phase == phase)


@IN_MODULE
async def test_set_ratio_under_load_fails_no_request(cluster: Cluster) -> None:
    """Every token of every request is compared with the reference."""
    async with steady_load(cluster, tokens=32) as answers:
        for wanted, switched in (("3:1", 1), ("1:3", 2), ("2:2", 1)):
            code, out, err = await run_baton(cluster, "ratio", "set", wanted, "--json")
            assert (code, err) == (0, "")
            told = json.loads(out)
            assert (f"{told['prefill']}:{told['decode']}", told["settled"]) == (wanted, True)
            assert [each["phase"] for each in told["over"]] == ["done"] * switched
            for each in told["over"]:
                assert each["switch_seconds"] > 0
                assert each["probe_seconds"] > 0
            served = len(answers)
            async with asyncio.timeout(60):
                while len(answers) < served + 4:
                    await asyncio.sleep(0.02)
    status = await cluster.get_status()
    assert sum_counter(
        status.counters, "baton_requests_total", **{"class": "default"}
    ) == sum_counter(
        status.counters, "baton_requests_total", outcome="length", **{"class": "default"}
    )
    assert sum_counter(status.counters, "baton_role_switches_total", outcome="done") == 4
    async with httpx2.AsyncClient() as client:
        metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
    assert 'baton_role_switch_seconds_count{phase="probe"} 4.0' in metrics
    assert 'baton_ratio_target{role="prefill"} 2.0' in metrics


@IN_MODULE
async def test_streams_beyond_the_timeout_move_to_other_nodes(cluster: Cluster) -> None:
    def moved(status: pb.StatusResponse) -> float:
        return sum_counter(status.counters, "baton_replaced_total", reason="drained")

    asked, before = (
        [make_prompt(900 + number) for number in range(8)],
        moved(await cluster.get_status()),
    )
    await cluster.arm_failpoints("", "decode.step.after=delay(0.2)")  # so that they do
    calls = [
        asyncio.create_task(cluster.generate(each, max_tokens=120, ignore_eos=True, deadline=60.0))
        for each in asked
    ]
    await cluster.wait_status(
        lambda status: (
            status.running == 8
            and all(node.placed for node in status.nodes if node.role == "decode")
        )
    )
    await set_ratio(cluster, 3, 1, flip_timeout_seconds=0.2)
    await cluster.wait_status(lambda status: moved(status) > before)
    await cluster.arm_failpoints("", "")
    for each, call in zip(asked, calls, strict=True):
        assert list((await call).tokens) == paced_reference_tokens(each, 120)
    await wait_ratio_reached(cluster, 3, 1)


@IN_MODULE
async def test_prefix_cache_survives_a_role_switch(cluster: Cluster) -> None:
    """Tests before this one have moved the roles about: names tell nothing. Of equals the first by
    name goes first."""
    before = roles_by_node(await cluster.wait_status(lambda status: len(status.nodes) == 4))
    first, other = sorted(name for name, role in before.items() if role == "prefill")
    await call_cluster_service(cluster.grpc_address, "Drain", pb.DrainRequest(node=other))
    asked = make_prompt(77, 320)
    assert list(
        (await cluster.generate(asked, max_tokens=4, ignore_eos=True)).tokens
    ) == paced_reference_tokens(asked, 4)
    await call_cluster_service(cluster.grpc_address, "Undrain", pb.UndrainRequest(node=other))
    await cluster.wait_idle()
    assert roles_by_node(await change_ratio(cluster, 1, 3))[first] == "decode"
    for name in before.keys() - {first, other}:
        await call_cluster_service(cluster.grpc_address, "Drain", pb.DrainRequest(node=name))
    answer = await cluster.generate(asked, max_tokens=4, ignore_eos=True)
    assert list(answer.tokens) == paced_reference_tokens(asked, 4)
    told = await call_cluster_service(
        cluster.grpc_address, "Explain", pb.ExplainRequest(request_id=answer.request_id)
    )
    assert told.attempts[-1].decode_node == first
    assert told.sources.local_cache >= 304, "decode found what it had computed as prefill"


@IN_MODULE
async def test_impossible_ratios_are_refused_and_the_target_is_shown(cluster: Cluster) -> None:
    for wanted, reason in (
        ("4:4", "possible are 1:3, 2:2, 3:1"),
        ("4:0", "possible are 1:3"),
        ("two:two", "is not P:D"),
    ):
        code, _, err = await run_baton(cluster, "ratio", "set", wanted)
        assert (code, reason in err) == (2, True)
    code, out, _ = await run_baton(cluster, "ratio", "show")
    assert (code, "possible with the live nodes: 1:3, 2:2, 3:1" in out) == (0, True)
    async with httpx2.AsyncClient() as client:
        answer = await client.post(f"{cluster.admin_url}/admin/ratio", json={"ratio": "9:1"})
        assert (answer.status_code, "possible are" in answer.json()["error"]["message"]) == (
            400,
            True,
        )
        shown = (await client.get(f"{cluster.admin_url}/admin/ratio")).json()
        assert (shown["prefill"], shown["decode"]) == (2, 2)


@IN_MODULE
@pytest.mark.parametrize("phase", ["draining", "switching", "probing"])
async def test_ratio_is_reached_when_a_switching_node_is_killed(
    cluster: Cluster, phase: str
) -> None:
    """It comes back in its first role, as under `baton up`, and the target still holds. Requests go
    on meanwhile. Which node it is, and which role it has had by then, is not known beforehand."""
    async with steady_load(cluster, tokens=16):
        writers = [
            name
            for name, role in roles_by_node(await cluster.get_status()).items()
            if role == "decode"
        ]
        if phase == "draining":
            await cluster.arm_failpoints("", "decode.step.after=delay(1.0)")
            await cluster.wait_status(
                lambda status: all(one.placed for one in status.nodes if one.role == "decode")
            )
        elif phase == "switching":
            for writer in writers:
                cluster.freeze(writer)  # so that whoever is told to switch does not
        elif phase == "probing":
            await cluster.arm_failpoints("", "prefill.layer.before=delay(1.5)")
        await set_ratio(cluster, 3, 1, flip_timeout_seconds=60.0 if phase == "draining" else 0.0)
        name = await wait_switching_node(cluster, phase)
        cluster.kill(name)
        for writer in set(writers) - {name}:
            cluster.resume(writer)
        await cluster.arm_failpoints("", "")
        cluster.start(name)
        status = await wait_ratio_reached(cluster, 3, 1)
    over = [each for each in status.ratio.over if each.generation == status.ratio.generation]
    assert over[0].node == name
    started_as = name.partition("-")[0]
    assert [each.phase for each in over] == (
        ["lost", "done"] if started_as == "decode" else ["lost"]
    )
    await cluster.wait_idle()


@IN_MODULE
async def test_restarted_coordinator_keeps_the_roles_of_nodes(cluster: Cluster) -> None:
    await cluster.arm_failpoints("", "prefill.layer.before=delay(1.5)")
    await set_ratio(cluster, 3, 1)
    await wait_switching_node(cluster, "probing")
    cluster.kill("coordinator")
    cluster.start("coordinator")
    await cluster.wait_ready()
    status = await cluster.wait_status(lambda status: len(status.nodes) == 4)
    assert sorted(roles_by_node(status).values()) == ["decode", "prefill", "prefill", "prefill"]
    assert not status.ratio.has_target
    await cluster.arm_failpoints("", "")
    async with steady_load(cluster, streams=3, tokens=8) as answers:
        await change_ratio(cluster, 2, 2)
        while len(answers) < 6:
            await asyncio.sleep(0.02)


@IN_MODULE
async def test_ratio_advice_follows_the_load_and_auto_ratio_reports_its_changes(
    cluster: Cluster,
) -> None:
    async with steady_load(cluster, tokens=10) as answers:
        async with asyncio.timeout(60):
            while len(answers) < 30:
                await asyncio.sleep(0.02)
        code, out, err = await run_baton(
            cluster, "ratio", "advise", "--slo", "ttft=5s,tpot=500ms", "--json"
        )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["slo"], told["present_prefill"], told["present_decode"]) == (
        "ttft=5000ms,tpot=500ms",
        2,
        2,
    )
    assert (
        told["ended"] >= 20,
        told["requests_per_second"] > 0,
        told["output_tokens_mean"] > 1,
    ) == (True, True, True)
    splits = [(each["prefill"], each["decode"]) for each in told["forecasts"]]
    assert (told["prefill"], told["decode"]) in splits
    assert all(
        each["ttft_p50"] > 0 and each["tpot"] > 0 and 0 <= each["share"] <= 1
        for each in told["forecasts"]
    )
    code, out, _ = await run_baton(cluster, "ratio", "auto", "--slo", "ttft=5s")
    assert (code, "automatic, for ttft=5000ms" in out) == (0, True)
    async with httpx2.AsyncClient() as client:
        metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
        assert "baton_ratio_auto 1.0" in metrics
        assert "baton_goodput_ratio " in metrics
        answer = await client.post(f"{cluster.admin_url}/admin/ratio", json={"auto": False})
        assert answer.json()["reason"].startswith("manual")
    code, out, _ = await run_baton(cluster, "ratio", "manual")
    assert (code, "automatic" in out) == (0, False)
