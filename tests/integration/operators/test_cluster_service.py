"""Status, ledgers, failpoints, readiness and metrics of a coordinator over scripted nodes."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from baton.pb.common_pb2 import Ledger
from baton.process.failpoints import FAILPOINTS
from coordinator.node_links import cluster_readiness
from coordinator.operators.metrics import TTFT_STAGES
from tests.fake_nodes import FakeNode
from tests.integration.coordinator_harness import CoordinatorHarness, running_coordinator

PROMPT = tuple(range(1, 40))


@pytest.fixture
async def bench() -> AsyncIterator[CoordinatorHarness]:
    async with running_coordinator(model="/models/tiny") as bench:
        yield bench


async def call_service(
    bench: CoordinatorHarness, method: str, request: Any, *, bearer: str = ""
) -> Any:
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
    async with grpc.aio.insecure_channel(bench.cluster_service_address) as channel:
        return await getattr(cluster_pb2_grpc.ClusterStub(channel), method)(
            request, metadata=metadata
        )


async def call_status_code(
    bench: CoordinatorHarness, method: str, request: Any, *, bearer: str = ""
) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_service(bench, method, request, bearer=bearer)
    return str(caught.value.code().name)


async def test_status_lists_nodes_and_requests(bench: CoordinatorHarness) -> None:
    async with bench.run_nodes("p0", "d0") as (_, decode):
        await decode.send_heartbeat(blocks_free=60, blocks_in_use=4)
        await bench.generate(PROMPT, 4)
        status = await call_service(bench, "Status", pb.StatusRequest())
    assert [(node.name, node.role, node.placed) for node in status.nodes] == [
        ("d0", "decode", 0),
        ("p0", "prefill", 0),
    ]
    assert status.nodes[0].stats.blocks_in_use == 4
    assert (status.model, status.mode, status.queued, status.running) == (
        "tiny",
        "disaggregated",
        0,
        0,
    )
    assert status.counters['baton_requests_total{outcome="length",class="default"}'] == 1
    assert status.counters["baton_generated_tokens_total"] == 4
    assert not status.ready
    assert "warm-up" in status.reason


async def test_model_name_is_reported_for_every_engine() -> None:
    async with running_coordinator(engine="paced") as bench:
        assert (await call_service(bench, "Status", pb.StatusRequest())).model == "paced"


async def answer_ledgers(node: FakeNode) -> None:
    ledger = Ledger(node=node.name, total=64, free=64)
    while True:
        query = await node.next_order("ledger_query", patience=100.0)
        await node.send_message(
            ledger=pb.LedgerReply(query=query.query + 1000, ledger=ledger)
        )  # of another query: not heard
        await node.send_message(ledger=pb.LedgerReply(query=query.query, ledger=ledger))
        await node.send_message(ledger=pb.LedgerReply(query=query.query, ledger=ledger))


async def test_ledger_call_returns_all_ledgers_and_names_silent_nodes(
    bench: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect: Any = bench.ledgers.collect_ledgers
    monkeypatch.setattr(collect.__func__, "__defaults__", (1.0,))
    async with bench.make_node("p0", "prefill") as prefill, bench.make_node("d0", "decode"):
        prefill.run_script(answer_ledgers(prefill))
        async with asyncio.timeout(60):
            reply = await call_service(bench, "Ledger", pb.LedgerRequest())
            while not reply.ledgers:  # p0 was not quick enough
                reply = await call_service(bench, "Ledger", pb.LedgerRequest())
    assert [ledger.node for ledger in reply.ledgers] == ["p0"]
    assert reply.silent == ["d0"]
    await bench.wait_until(lambda: not bench.dispatcher.brain.list_members())
    assert (await call_service(bench, "Ledger", pb.LedgerRequest())) == pb.LedgerResponse()


async def test_failpoints_are_armed_by_name_and_only_when_allowed() -> None:
    spec = "decode.step.before=delay(1)"
    async with running_coordinator() as bench:
        request = pb.ArmFailpointsRequest(node="d", spec=spec)
        assert await call_status_code(bench, "ArmFailpoints", request) == "UNIMPLEMENTED"
    async with (
        running_coordinator(failpoints_rpc=True) as bench,
        bench.make_node("p0", "prefill"),
        bench.make_node("d0", "decode") as d0,
    ):
        assert (
            await call_service(bench, "ArmFailpoints", pb.ArmFailpointsRequest(node="d", spec=spec))
        ).nodes == 1
        assert (await d0.next_order("arm")).spec == spec
        link = pb.ArmFailpointsRequest(node="coordinator", spec="link.coordinator.send=delay(0)")
        try:
            assert (await call_service(bench, "ArmFailpoints", link)).nodes == 1
            assert "link.coordinator.send" in FAILPOINTS.armed
            assert (
                await call_service(bench, "ArmFailpoints", pb.ArmFailpointsRequest())
            ).nodes == 3
            assert "link.coordinator.send" not in FAILPOINTS.armed
        finally:
            FAILPOINTS.arm("")
        bad = pb.ArmFailpointsRequest(node="d", spec="nowhere=exit")
        assert await call_status_code(bench, "ArmFailpoints", bad) == "INVALID_ARGUMENT"


METHODS = {
    "Status": pb.StatusRequest(),
    "Ledger": pb.LedgerRequest(),
    "ArmFailpoints": pb.ArmFailpointsRequest(),
}
RATIO = {"GetRatio", "SetRatio", "AdviseRatio", "AutoRatio", "ManualRatio"}
TESTED_ELSEWHERE = {
    "Watch",
    "Explain",
    "Drain",
    "Undrain",
} | RATIO  # tests/integration/operators/test_operator_rpcs.py


def test_method_table_covers_every_rpc() -> None:
    assert set(METHODS) | TESTED_ELSEWHERE == {
        method.name for method in pb.DESCRIPTOR.services_by_name["Cluster"].methods
    }


@pytest.mark.parametrize("method", METHODS)
async def test_the_admin_token_guards_every_method(method: str) -> None:
    async with running_coordinator(admin_token="secret", failpoints_rpc=True) as bench:
        assert await call_status_code(bench, method, METHODS[method]) == "UNAUTHENTICATED"
        assert (
            await call_status_code(bench, method, METHODS[method], bearer="wrong")
            == "UNAUTHENTICATED"
        )
        await call_service(bench, method, METHODS[method], bearer="secret")


@pytest.mark.parametrize("method", METHODS)
async def test_without_admin_token_only_loopback_is_allowed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_coordinator(failpoints_rpc=True) as bench:
        await call_service(bench, method, METHODS[method])
        monkeypatch.setattr(
            "coordinator.frontend.grpc.errors.parse_peer_address", lambda peer: "10.0.0.1"
        )
        assert await call_status_code(bench, method, METHODS[method]) == "UNAUTHENTICATED"


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
async def test_without_admin_token_proxied_calls_are_refused(header: str) -> None:
    """Its address is this machine's, whoever the caller was."""
    async with (
        running_coordinator() as bench,
        grpc.aio.insecure_channel(bench.cluster_service_address) as channel,
    ):
        stub = cluster_pb2_grpc.ClusterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Status(pb.StatusRequest(), metadata=((header, "203.0.113.9"),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "--admin-token" in (caught.value.details() or "")


# readiness


async def test_coordinator_is_ready_after_warm_up_while_it_can_serve(
    bench: CoordinatorHarness,
) -> None:
    changes: list[tuple[bool, str]] = []
    bench.readiness.on_change.append(lambda ready, reason: changes.append((ready, reason)))
    warming = asyncio.create_task(bench.readiness.run())
    assert bench.readiness.state() == (False, "there is no decode node")
    async with bench.run_nodes("p0", "d0") as (prefill, decode):
        await asyncio.wait_for(warming, 30.0)
        assert bench.readiness.state() == (True, "")
        assert changes[-1] == (True, "")
        assert bench.dispatcher.brain.counters.requests == {("length", "internal"): 1}
        await prefill.drop_connection()
        await bench.wait_until(lambda: bench.dispatcher.brain.why_no_prefill() != "")
        assert bench.readiness.state() == (True, ""), "decode nodes serve alone"
        await decode.drop_connection()
        await bench.wait_until(lambda: not bench.readiness.state()[0])
        assert changes[-1] == (False, "there is no decode node")
        async with bench.run_nodes("d1"):
            assert bench.readiness.state() == (True, "")
            await bench.dispatcher.drain_requests(1.0)
            assert changes[-1] == (False, "the cluster is stopping")


async def test_warm_up_waits_for_a_prefill_node_but_requests_do_not(
    bench: CoordinatorHarness,
) -> None:
    warming = asyncio.create_task(bench.readiness.run())
    async with bench.run_nodes("d0"):
        await bench.wait_until(lambda: "no prefill node" in bench.readiness.state()[1])
        assert len((await bench.generate(PROMPT, 4))[0]) == 4
        assert not warming.done()
        async with bench.run_nodes("p0"):
            await asyncio.wait_for(warming, 30.0)
            assert bench.readiness.state() == (True, "")
            placements = bench.dispatcher.brain.counters.placements
            assert placements == {("local", "no_prefill_node"): 1, ("hand_off", "mode"): 1}


async def test_warm_up_proceeds_when_no_prefill_node_joins(
    bench: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_readiness, "PREFILL_WAIT_SECONDS", 0.05)
    warming = asyncio.create_task(bench.readiness.run())
    async with bench.run_nodes("d0"):
        await asyncio.wait_for(warming, 30.0)
        assert bench.readiness.state() == (True, "")
        assert bench.dispatcher.brain.counters.placements == {("local", "no_prefill_node"): 1}


async def test_failed_warm_up_is_retried() -> None:
    async with running_coordinator(max_attempts=1, heartbeat=0.05) as bench:
        warming = asyncio.create_task(bench.readiness.run())
        async with bench.run_nodes("p0"), bench.make_node("d0", "decode") as decode:
            submit = await decode.next_order("submit")
            await decode.send_message(
                failed=pb.AttemptFailed(
                    key=submit.work.key, error={"code": "out_of_memory", "message": "too big"}
                )
            )
            await bench.wait_until(lambda: "too big" in bench.readiness.state()[1])
            assert not bench.readiness.state()[0]
            await decode.send_heartbeat()
            await decode.next_order("submit")
        warming.cancel()


async def test_stalled_requests_make_the_coordinator_unready() -> None:
    async with (
        running_coordinator(stall=1.0) as bench,
        bench.run_nodes("p0"),
        bench.make_node("d0", "decode") as decode,
    ):
        bench.readiness._not_warm_reason, began = "", time.monotonic()
        stream = await bench.submit_request(PROMPT, 4)
        await decode.send_reserved(await decode.next_order("submit"))
        assert bench.readiness.state() == (True, "") or time.monotonic() - began >= 1.0
        async with asyncio.timeout(30):
            while bench.readiness.state()[0]:
                await asyncio.sleep(0.05)
        assert (
            "1 requests run, 0 wait, and none has got any further for" in bench.readiness.state()[1]
        )
        stream.cancel()
        assert bench.readiness.state() == (True, "")


# metrics


def scrape(bench: CoordinatorHarness) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(bench.metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_cover_requests_and_nodes(bench: CoordinatorHarness) -> None:
    async with bench.run_nodes("p0", "d0") as (prefill, decode):
        await bench.generate(PROMPT, 4)
        await prefill.send_heartbeat(waiting=2)
        await decode.send_heartbeat(
            blocks_free=60,
            blocks_quarantined=4,
            counters={
                "baton_transfer_frames_total": 3,
                'baton_transfer_errors_total{reason="late"}': 2,
                "baton_requests_total": 9,  # a name of ours: kept apart
                "steps": 7,
                "bad name!": 1,
            },
        )
        await bench.wait_until(
            lambda: all(node.stats for node in bench.dispatcher.brain.node_registry.nodes.values())
        )
        found = scrape(bench)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    assert value("baton_requests_total", outcome="length", **{"class": "default"}) == 1
    assert value("baton_generated_tokens_total") == 4
    assert value("baton_prompt_tokens_total", source="computed_prefill") == len(PROMPT)
    assert value("baton_handoffs_total", outcome="committed", transport="memory") == 1
    assert value("baton_handoff_bytes_total", transport="memory") == 4096
    assert value("baton_joins_total", outcome="joined") == 2
    assert value("baton_request_ttft_seconds_count", **{"class": "default"}) == 1
    assert value("baton_request_tpot_seconds_count", **{"class": "default"}) == 1
    parts = sum(value("baton_request_stage_seconds_sum", stage=stage) for stage in TTFT_STAGES)
    assert parts == pytest.approx(value("baton_request_ttft_seconds_sum", **{"class": "default"}))
    assert value("baton_kv_blocks", node="d0", state="free") == 60
    assert value("baton_kv_blocks", node="d0", state="quarantined") == 4
    assert value("baton_node_role", node="p0", role="prefill") == 1
    assert value("baton_queue_depth", role="prefill") == 2
    assert value("baton_queue_depth", role="coordinator") == 0
    assert value("baton_transfer_frames_total", node="d0") == 3
    assert value("baton_transfer_errors_total", node="d0", reason="late") == 2
    assert value("baton_node_requests_total", node="d0") == 9
    assert value("baton_node_steps", node="d0") == 7
    assert not [name for name, _ in found if "bad" in name]
