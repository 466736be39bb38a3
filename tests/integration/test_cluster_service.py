"""Status, ledgers, failpoints, readiness and metrics of a coordinator over scripted nodes."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.failpoints import FAILPOINTS
from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from baton.pb.common_pb2 import Ledger
from coordinator import warmup
from coordinator.metrics import STAGES
from tests.fakes import FakeNode
from tests.integration.coordinator_bench import Bench, coordinator

PROMPT = tuple(range(1, 40))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with coordinator(model="/models/tiny") as bench:
        yield bench


async def call(bench: Bench, method: str, request: Any, *, bearer: str = "") -> Any:
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
    async with grpc.aio.insecure_channel(bench.operators) as channel:
        return await getattr(cluster_pb2_grpc.ClusterStub(channel), method)(request, metadata=metadata)


async def code_of(bench: Bench, method: str, request: Any, *, bearer: str = "") -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(bench, method, request, bearer=bearer)
    return str(caught.value.code().name)


async def test_status(bench: Bench) -> None:
    async with bench.working("p0", "d0") as (_, decode):
        await decode.heartbeat(blocks_free=60, blocks_in_use=4)
        await bench.generate(PROMPT, 4)
        status = await call(bench, "Status", pb.StatusRequest())
    assert [(node.name, node.role, node.placed) for node in status.nodes] == [("d0", "decode", 0), ("p0", "prefill", 0)]
    assert status.nodes[0].stats.blocks_in_use == 4
    assert (status.model, status.mode, status.queued, status.running) == ("tiny", "disaggregated", 0, 0)
    assert status.counters['baton_requests_total{outcome="length",class="default"}'] == 1
    assert status.counters["baton_generated_tokens_total"] == 4
    assert not status.ready
    assert "warm-up" in status.reason


async def test_the_model_has_its_name_whatever_the_engine() -> None:
    async with coordinator(engine="paced") as bench:
        assert (await call(bench, "Status", pb.StatusRequest())).model == "paced"


async def answer_ledgers(node: FakeNode) -> None:
    ledger = Ledger(node=node.name, total=64, free=64)
    while True:
        query = await node.order("ledger_query", patience=100.0)
        await node.send(ledger=pb.LedgerReply(query=query.query + 1000, ledger=ledger))  # of another query: not heard
        await node.send(ledger=pb.LedgerReply(query=query.query, ledger=ledger))
        await node.send(ledger=pb.LedgerReply(query=query.query, ledger=ledger))


async def test_ledgers_of_all_nodes_and_the_names_of_the_silent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.ledgers.collect.__func__, "__defaults__", (1.0,))  # type: ignore[attr-defined]
    async with bench.node("p0", "prefill") as prefill, bench.node("d0", "decode"):
        prefill.run(answer_ledgers(prefill))
        async with asyncio.timeout(60):
            reply = await call(bench, "Ledger", pb.LedgerRequest())
            while not reply.ledgers:  # p0 was not quick enough
                reply = await call(bench, "Ledger", pb.LedgerRequest())
    assert [ledger.node for ledger in reply.ledgers] == ["p0"]
    assert reply.silent == ["d0"]
    await bench.until(lambda: not bench.dispatcher.brain.members())
    assert (await call(bench, "Ledger", pb.LedgerRequest())) == pb.LedgerResponse()


async def test_failpoints_are_armed_by_name_and_only_when_allowed() -> None:
    spec = "decode.step.before=delay(1)"
    async with coordinator() as bench:
        request = pb.ArmFailpointsRequest(node="d", spec=spec)
        assert await code_of(bench, "ArmFailpoints", request) == "UNIMPLEMENTED"
    async with coordinator(failpoints_rpc=True) as bench, bench.node("p0", "prefill"), bench.node("d0", "decode") as d0:
        assert (await call(bench, "ArmFailpoints", pb.ArmFailpointsRequest(node="d", spec=spec))).nodes == 1
        assert (await d0.order("arm")).spec == spec
        link = pb.ArmFailpointsRequest(node="coordinator", spec="link.coordinator.send=delay(0)")
        try:
            assert (await call(bench, "ArmFailpoints", link)).nodes == 1
            assert FAILPOINTS.armed("link.coordinator.send")
            assert (await call(bench, "ArmFailpoints", pb.ArmFailpointsRequest())).nodes == 3
            assert not FAILPOINTS.armed("link.coordinator.send")
        finally:
            FAILPOINTS.arm("")
        bad = pb.ArmFailpointsRequest(node="d", spec="nowhere=exit")
        assert await code_of(bench, "ArmFailpoints", bad) == "INVALID_ARGUMENT"


METHODS = {"Status": pb.StatusRequest(), "Ledger": pb.LedgerRequest(), "ArmFailpoints": pb.ArmFailpointsRequest()}
RATIO = {"GetRatio", "SetRatio", "AdviseRatio", "AutoRatio", "ManualRatio"}
SEE_OPERATORS = {"Watch", "Explain", "Drain", "Undrain"} | RATIO  # tests/integration/test_operators.py


def test_every_method_is_here() -> None:
    assert set(METHODS) | SEE_OPERATORS == {method.name for method in pb.DESCRIPTOR.services_by_name["Cluster"].methods}


@pytest.mark.parametrize("method", METHODS)
async def test_the_admin_token_guards_every_method(method: str) -> None:
    async with coordinator(admin_token="secret", failpoints_rpc=True) as bench:
        assert await code_of(bench, method, METHODS[method]) == "UNAUTHENTICATED"
        assert await code_of(bench, method, METHODS[method], bearer="wrong") == "UNAUTHENTICATED"
        await call(bench, method, METHODS[method], bearer="secret")


@pytest.mark.parametrize("method", METHODS)
async def test_without_a_token_only_loopback_may_ask(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with coordinator(failpoints_rpc=True) as bench:
        await call(bench, method, METHODS[method])
        monkeypatch.setattr("coordinator.grpc_terms.peer_address", lambda peer: "10.0.0.1")
        assert await code_of(bench, method, METHODS[method]) == "UNAUTHENTICATED"


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
async def test_without_a_token_a_proxy_may_not_pass_calls_on(header: str) -> None:
    """Its address is this machine's, whoever the caller was."""
    async with coordinator() as bench, grpc.aio.insecure_channel(bench.operators) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Status(pb.StatusRequest(), metadata=((header, "203.0.113.9"),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "--admin-token" in (caught.value.details() or "")


# readiness


async def test_ready_when_warm_and_while_it_can_serve(bench: Bench) -> None:
    changes: list[tuple[bool, str]] = []
    bench.readiness.on_change.append(lambda ready, reason: changes.append((ready, reason)))
    warming = asyncio.create_task(bench.readiness.run())
    assert bench.readiness.state() == (False, "there is no decode node")
    async with bench.working("p0", "d0") as (prefill, decode):
        await asyncio.wait_for(warming, 30.0)
        assert bench.readiness.state() == (True, "")
        assert changes[-1] == (True, "")
        assert bench.dispatcher.brain.counters.requests == {("length", "internal"): 1}
        await prefill.die()
        await bench.until(lambda: bench.dispatcher.brain.missing_prefill() != "")
        assert bench.readiness.state() == (True, ""), "decode nodes serve alone"
        await decode.die()
        await bench.until(lambda: not bench.readiness.state()[0])
        assert changes[-1] == (False, "there is no decode node")
        async with bench.working("d1"):
            assert bench.readiness.state() == (True, "")
            await bench.dispatcher.drain(1.0)
            assert changes[-1] == (False, "the cluster is stopping")


async def test_the_warm_up_waits_for_a_prefill_node_and_requests_do_not(bench: Bench) -> None:
    warming = asyncio.create_task(bench.readiness.run())
    async with bench.working("d0"):
        await bench.until(lambda: "no prefill node" in bench.readiness.state()[1])
        assert len((await bench.generate(PROMPT, 4))[0]) == 4
        assert not warming.done()
        async with bench.working("p0"):
            await asyncio.wait_for(warming, 30.0)
            assert bench.readiness.state() == (True, "")
            placements = bench.dispatcher.brain.counters.placements
            assert placements == {("local", "no_prefill_node"): 1, ("hand_off", "mode"): 1}


async def test_the_warm_up_does_without_a_prefill_node_that_does_not_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "PREFILL_PATIENCE", 0.05)
    warming = asyncio.create_task(bench.readiness.run())
    async with bench.working("d0"):
        await asyncio.wait_for(warming, 30.0)
        assert bench.readiness.state() == (True, "")
        assert bench.dispatcher.brain.counters.placements == {("local", "no_prefill_node"): 1}


async def test_a_warm_up_that_fails_is_tried_again() -> None:
    async with coordinator(max_attempts=1, heartbeat=0.05) as bench:
        warming = asyncio.create_task(bench.readiness.run())
        async with bench.working("p0"), bench.node("d0", "decode") as decode:
            submit = await decode.order("submit")
            await decode.send(
                failed=pb.AttemptFailed(key=submit.work.key, error={"code": "out_of_memory", "message": "too big"})
            )
            await bench.until(lambda: "too big" in bench.readiness.state()[1])
            assert not bench.readiness.state()[0]
            await decode.heartbeat()
            await decode.order("submit")
        warming.cancel()


async def test_requests_that_stand_still_make_it_unready() -> None:
    async with coordinator(stall=1.0) as bench, bench.working("p0"), bench.node("d0", "decode") as decode:
        bench.readiness._not_warm, began = "", time.monotonic()
        stream = await bench.submit(PROMPT, 4)
        await decode.reserve(await decode.order("submit"))
        assert bench.readiness.state() == (True, "") or time.monotonic() - began >= 1.0
        async with asyncio.timeout(30):
            while bench.readiness.state()[0]:
                await asyncio.sleep(0.05)
        assert "1 requests run, 0 wait, and none has got any further for" in bench.readiness.state()[1]
        stream.cancel()
        assert bench.readiness.state() == (True, "")


# metrics


def scrape(bench: Bench) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(bench.metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics(bench: Bench) -> None:
    async with bench.working("p0", "d0") as (prefill, decode):
        await bench.generate(PROMPT, 4)
        await prefill.heartbeat(waiting=2)
        await decode.heartbeat(
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
        await bench.until(lambda: all(node.stats for node in bench.dispatcher.brain.registry.nodes.values()))
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
    parts = sum(value("baton_request_stage_seconds_sum", stage=stage) for stage in STAGES)
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
