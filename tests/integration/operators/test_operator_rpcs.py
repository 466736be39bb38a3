"""What operators call, over gRPC, on a coordinator with scripted nodes: explain, drain, undrain,
watch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from coordinator.operators import status_watchers
from tests.integration.coordinator_harness import CoordinatorHarness, running_coordinator

PROMPT = tuple(range(1, 40))
OPERATOR_CALLS = {
    "Explain": (pb.ExplainRequest(request_id="x"), "NOT_FOUND"),
    "Drain": (pb.DrainRequest(node="x"), "NOT_FOUND"),
    "Undrain": (pb.UndrainRequest(node="x"), "NOT_FOUND"),
    "SetRatio": (pb.SetRatioRequest(prefill=1, decode=1), "INVALID_ARGUMENT"),
    "AdviseRatio": (pb.AdviseRatioRequest(), "INVALID_ARGUMENT"),
    "AutoRatio": (pb.AutoRatioRequest(slo="soon"), "INVALID_ARGUMENT"),
    "Watch": (pb.WatchRequest(interval_seconds=0.01), "INVALID_ARGUMENT"),
}


@pytest.fixture
async def bench() -> AsyncIterator[CoordinatorHarness]:
    async with running_coordinator(model="/models/tiny", heartbeat=0.05) as bench:
        yield bench


async def call_service(
    bench: CoordinatorHarness, method: str, request: Any, bearer: str = ""
) -> Any:
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else ()
    async with grpc.aio.insecure_channel(bench.cluster_service_address) as channel:
        made = getattr(cluster_pb2_grpc.ClusterStub(channel), method)(
            request, metadata=metadata, timeout=30.0
        )
        return [answer async for answer in made] if method == "Watch" else await made


async def call_error(
    bench: CoordinatorHarness, method: str, request: Any, bearer: str = ""
) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_service(bench, method, request, bearer)
    return caught.value.code().name, caught.value.details() or ""


@pytest.mark.parametrize("method", OPERATOR_CALLS)
async def test_every_operator_call_needs_the_admin_token(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, answer = OPERATOR_CALLS[method]
    async with running_coordinator(admin_token="secret") as bench:
        assert (await call_error(bench, method, request))[0] == "UNAUTHENTICATED"
        assert (await call_error(bench, method, request, "secret"))[0] == answer
    async with running_coordinator() as bench:
        assert (await call_error(bench, method, request))[0] == answer
        monkeypatch.setattr(
            "coordinator.frontend.grpc.errors.parse_peer_address", lambda peer: "10.0.0.1"
        )
        assert (await call_error(bench, method, request))[0] == "UNAUTHENTICATED"


async def test_explain_describes_the_attempts_of_a_request(bench: CoordinatorHarness) -> None:
    async with bench.run_nodes("p0", "d0"):
        stream = await bench.submit_request(PROMPT, 4)
        async for _ in stream:
            pass
        told = await call_service(bench, "Explain", pb.ExplainRequest(request_id=stream.id))
    assert (told.state, told.output_tokens, told.prompt_tokens) == ("finished", 4, len(PROMPT))
    assert [attempt.decode_node for attempt in told.attempts] == ["d0"]
    code, message = await call_error(bench, "Explain", pb.ExplainRequest(request_id="nobody"))
    assert (code, "'nobody'" in message, "--explain-keep" in message) == ("NOT_FOUND", True, True)


async def test_drain_and_undrain(bench: CoordinatorHarness) -> None:
    async with bench.run_nodes("p0", "d0", "d1") as (_, d0, _):
        answer = await call_service(bench, "Drain", pb.DrainRequest(node="d0"))
        assert (answer.service, answer.warning) == ("draining", "")
        for _ in range(3):
            await d0.send_heartbeat()
        await bench.wait_until(lambda: node_service_state(bench, "d0") == "drained")
        answer = await call_service(bench, "Drain", pb.DrainRequest(node="d1", timeout_seconds=60))
        assert "there is no decode node but drained ones (d0, d1): requests wait" in answer.warning
        assert (
            0
            < next(
                n for n in bench.operations.get_status().nodes if n.name == "d1"
            ).drain_seconds_left
            <= 60
        )
        assert not bench.readiness.state()[0]
        for name in ("d0", "d1"):
            answer = await call_service(bench, "Undrain", pb.UndrainRequest(node=name))
            assert (answer.service, answer.warning) == ("in", "")
        assert (await bench.generate(PROMPT, 4))[1]
    code, message = await call_error(
        bench, "Drain", pb.DrainRequest(node="d0", timeout_seconds=float("nan"))
    )
    assert (code, "timeout_seconds is nan" in message) == ("INVALID_ARGUMENT", True)


async def test_set_ratio_is_reported_by_get_ratio(bench: CoordinatorHarness) -> None:
    async with bench.run_nodes("p0", "d0", "d1"):
        told = await call_service(bench, "GetRatio", pb.GetRatioRequest())
        assert (told.prefill, told.decode, told.has_target, told.possible) == (
            1,
            2,
            False,
            "1:2, 2:1",
        )
        told = await call_service(bench, "SetRatio", pb.SetRatioRequest(prefill=2, decode=1))
        assert [(each.to_role, each.phase) for each in told.switches] == [("prefill", "switching")]
        [moving] = [
            node for node in bench.operations.get_status().nodes if node.service == "switching"
        ]
        assert moving.name == told.switches[0].node
    for fields in ({"prefill": 3}, {"prefill": 2, "decode": 1, "flip_timeout_seconds": -1.0}):
        assert (await call_error(bench, "SetRatio", pb.SetRatioRequest(**fields)))[
            0
        ] == "INVALID_ARGUMENT"


async def test_ratio_advice_and_auto_ratio(bench: CoordinatorHarness) -> None:
    async with bench.run_nodes("p0", "d0", "d1"):
        code, message = await call_error(bench, "AdviseRatio", pb.AdviseRatioRequest())
        assert (code, "advice needs 20 at least" in message) == ("UNAVAILABLE", True)
        told = await call_service(bench, "AutoRatio", pb.AutoRatioRequest(slo="tpot=30ms"))
        assert (told.automatic, told.slo, bool(told.reason)) == (True, "tpot=30ms", True)
        told = await call_service(bench, "ManualRatio", pb.ManualRatioRequest())
        assert (told.automatic, told.slo) == (False, "ttft=500ms,tpot=50ms")
        await call_service(bench, "AutoRatio", pb.AutoRatioRequest())
        told = await call_service(bench, "SetRatio", pb.SetRatioRequest(prefill=1, decode=2))
        assert not told.automatic
    bad = pb.AutoRatioRequest(flip_timeout_seconds=-1.0)
    assert (await call_error(bench, "AutoRatio", bad))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "method",
    [
        "Status",
        "Watch",
        "Ledger",
        "Explain",
        "Drain",
        "Undrain",
        "SetRatio",
        "AutoRatio",
        "ArmFailpoints",
    ],
)
async def test_malformed_protobuf_is_refused(bench: CoordinatorHarness, method: str) -> None:
    async with grpc.aio.insecure_channel(bench.cluster_service_address) as channel:
        make = channel.unary_stream if method == "Watch" else channel.unary_unary
        call = make(f"/baton.v1.Cluster/{method}")(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError, match="its bytes cannot be read") as told:
            await (call.read() if method == "Watch" else call)
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def node_service_state(bench: CoordinatorHarness, name: str) -> str:
    return next(
        (str(node.service) for node in bench.operations.get_status().nodes if node.name == name), ""
    )


async def test_watch_sends_the_state_at_once_and_then_changes(bench: CoordinatorHarness) -> None:
    async with grpc.aio.insecure_channel(bench.cluster_service_address) as channel:
        watch = cluster_pb2_grpc.ClusterStub(channel).Watch(
            pb.WatchRequest(interval_seconds=0.1), timeout=30.0
        )
        assert len((await watch.read()).nodes) == 0
        async with bench.make_node("p0", "prefill"):
            assert [node.name for node in (await watch.read()).nodes] == ["p0"]
        bench.operations.close()
        while (await watch.read()) is not grpc.aio.EOF:  # what was under way, and then the end
            pass


async def test_watchers_are_bounded_and_slow_ones_get_the_newest_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_watchers, "MAX_WATCHERS", 1)
    counted = iter(range(1000))
    many = status_watchers.StatusWatchers(lambda: pb.StatusResponse(queued=next(counted)))
    first = many.watch_status(0.1)
    assert (await anext(first)).queued == 0
    with pytest.raises(Exception, match="1 callers watch"):
        await anext(many.watch_status(0.1))
    for _ in range(50):
        many.notify_change()
    assert (await anext(first)).queued == 1
    await first.aclose()
    second = many.watch_status(60.0)
    await anext(second)
    waiting = asyncio.ensure_future(anext(second, None))
    await asyncio.sleep(0)
    many.close()
    assert await asyncio.wait_for(waiting, 30.0) is None


@pytest.mark.parametrize("interval", [-1.0, 0.01, 61.0, float("inf"), float("nan")])
async def test_watch_interval_out_of_range_is_refused(interval: float) -> None:
    with pytest.raises(Exception, match=r"interval_seconds is .*0.1 to 60"):
        await anext(status_watchers.StatusWatchers(pb.StatusResponse).watch_status(interval))
