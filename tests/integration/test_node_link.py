"""Dispatcher and node link over real gRPC on loopback, against scripted nodes."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton import cluster_certificates, link_codec
from baton.errors import Cancelled, ConfigError, DeadlineExceeded, Draining, LeaseExpired, SlowReader, Unavailable
from baton.failpoints import FAILPOINTS
from baton.link_codec import Numbers
from baton.link_dialer import PROOF_KEY, LinkDialer, has_other_token, link_proof
from baton.pb import cluster_pb2 as pb
from baton.types import FinishReason, Incarnation
from baton.wire import key_from_pb
from coordinator import node_link
from coordinator.generation import Delta
from coordinator.node_link import JOIN_TIMEOUT, NodeStream
from coordinator.stream import MAX_UNREAD
from tests.fakes import FakeNode, expected_tokens
from tests.integration.coordinator_bench import Bench, collect, coordinator

PROMPT = tuple(range(1, 40))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with coordinator() as bench:
        yield bench


async def test_a_request_goes_through_both_nodes(bench: Bench) -> None:
    async with bench.working("p0", "d0", gap=0.1):  # in which prefill's report of the hand-off comes
        tokens, done = await bench.generate(PROMPT, 10)
        assert tokens == expected_tokens(PROMPT, 10)
        assert done.reason is FinishReason.LENGTH
        timeline = done.timeline
        assert (timeline.prefill_node, timeline.decode_node, timeline.attempts) == ("p0", "d0", 1)
        assert timeline.handoff.bytes == 4096
        stages = (timeline.queue, timeline.reserve, timeline.prefill, timeline.transfer, timeline.first_token)
        assert sum(stages) == timeline.ttft
        sources = bench.dispatcher.brain.counters.prompt_tokens
        assert {source for source, tokens in sources.items() if tokens} == {"computed_prefill"}
        assert sources["computed_prefill"] == len(PROMPT)


async def test_many_at_once(bench: Bench) -> None:
    async with bench.working("p0", "p1", "d0", "d1"):
        prompts = [tuple(range(n, n + 5 + n % 40)) for n in range(1, 101)]
        answers = await asyncio.gather(*(bench.generate(prompt, 1 + n % 9) for n, prompt in enumerate(prompts)))
        for n, (prompt, (tokens, _)) in enumerate(zip(prompts, answers, strict=True)):
            assert tokens == expected_tokens(prompt, 1 + n % 9)
        assert bench.dispatcher.brain.running == bench.dispatcher.brain.queued == 0


async def test_colocated() -> None:
    async with coordinator(prefill=0) as bench, bench.working("d0"):
        assert (await bench.generate(PROMPT, 3))[0] == expected_tokens(PROMPT, 3)


async def test_a_refusal_waits_until_there_is_room(bench: Bench) -> None:
    async with bench.node("p0", "prefill") as prefill, bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 4)
        submit = await decode.order("submit")
        assert (await prefill.order("prefill")).work == submit.work
        await decode.send(refused=pb.Refused(key=submit.work.key, needed=3, free=1))
        assert (await prefill.order("cancel")).key == submit.work.key
        await decode.heartbeat(blocks_free=2)
        await decode.heartbeat(blocks_free=3)
        again = await decode.order("submit")
        assert again.work.key.attempt == 2
        stream.cancel()


async def test_a_decode_node_dies_and_the_stream_goes_on(bench: Bench) -> None:
    async with bench.working("p0", "d0", "d1", burst=1, gap=0.001) as (_, d0, d1):
        stream = await bench.submit(PROMPT, 120)
        seen: list[int] = []
        async for event in stream:
            if isinstance(event, Delta):
                seen += event.tokens
                if len(seen) == 20:
                    (victim,) = [
                        node
                        for node in (d0, d1)
                        if bench.dispatcher.brain.placed_on(node.incarnation)  # type: ignore[arg-type]
                    ]
                    await victim.die()
        assert tuple(seen) == expected_tokens(PROMPT, 120)
        assert bench.dispatcher.brain.counters.replaced == {"node_gone": 1}


async def test_a_prefill_node_dies_before_the_hand_off(bench: Bench) -> None:
    async with bench.node("p0", "prefill") as prefill, bench.working("d0") as (decode,):
        waiting = asyncio.create_task(bench.generate(PROMPT, 4))
        old = prefill.incarnation
        await prefill.order("prefill")
        await prefill.order("ticket")
        await prefill.die()
        async with bench.working("p1"):
            tokens, done = await waiting
        assert tokens == expected_tokens(PROMPT, 4)
        assert done.timeline.attempts == 2
        assert old not in bench.dispatcher.links
        assert {key.attempt for key in decode.cancelled} == {1}


async def test_every_other_node_hears_of_a_death(bench: Bench) -> None:
    async with bench.node("p0", "prefill") as p0, bench.node("d0", "decode") as d0, bench.node("d1", "decode") as d1:
        gone = d0.incarnation
        await d0.die()
        for node in (p0, d1):
            assert (await node.order("peer_gone")).incarnation == gone


async def test_joining_anew_ends_the_old_stream(bench: Bench) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode") as old:
        stream = await bench.submit(PROMPT, 4)
        await old.order("submit")
        async with bench.node("d0", "decode", changes={"rejoining": old.incarnation}) as new:
            await old.ended()
            await new.heartbeat()
            assert key_from_pb((await new.order("submit")).work.key) == (stream.id, 2, 0)
            assert new.incarnation != old.incarnation
        stream.cancel()


async def test_a_message_of_another_incarnation_ends_the_stream(bench: Bench) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 4)
        submit = await decode.order("submit")
        await decode.send(incarnation="0123456789abcdef", reserved=pb.Reserved(key=submit.work.key))
        await decode.ended()
        assert bench.dispatcher.brain.counters.dropped_messages["stale"] == 1
        stream.cancel()


@pytest.mark.parametrize("token", ["", "wrong", "seçret"])
async def test_a_node_with_another_token_fails_the_handshake(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.node_port.PATIENCE", 0.2)
    async with coordinator(cluster_token="secret") as bench:
        node = FakeNode(bench.address, "p0", "prefill", token=token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.join()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert has_other_token(caught.value)
        await node.die()
        joins = bench.dispatcher.brain.counters.joins
        async with asyncio.timeout(30.0):
            while not joins["unauthenticated"]:
                await asyncio.sleep(0.05)
        async with FakeNode(bench.address, "p0", "prefill", token="secret"):
            assert len(bench.dispatcher.links) == 1
        assert joins["joined"] == 1


async def test_whoever_shows_no_certificate_gets_no_stream() -> None:
    async with coordinator(cluster_token="secret") as bench:
        authority = cluster_certificates._self_signed(cluster_certificates._authority("secret"))
        named = (("grpc.ssl_target_name_override", cluster_certificates.COORDINATOR_NAME),)
        bare = grpc.aio.secure_channel(bench.address, grpc.ssl_channel_credentials(authority), options=named)
        for channel in (bare, grpc.aio.insecure_channel(bench.address)):
            async with channel:
                call = link_codec.dial(channel, metadata=((PROOF_KEY, link_proof("secret")),))
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert bench.dispatcher.links == {}


@pytest.mark.parametrize("metadata", [(), ((PROOF_KEY, link_proof("wrong")),), ((PROOF_KEY, b""),)], ids=len)
async def test_a_certificate_without_the_proof_is_not_enough(metadata: tuple[tuple[str, bytes], ...]) -> None:
    async with coordinator(cluster_token="secret") as bench:
        async with LinkDialer("secret").open_channel(bench.address) as channel:
            call = link_codec.dial(channel, metadata=metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert bench.dispatcher.brain.counters.joins == {"unauthenticated": 1}


async def test_a_node_dials_nobody_who_is_not_the_coordinator() -> None:
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", cluster_certificates.decode_credentials("secret"))
    await server.start()
    node = FakeNode(f"127.0.0.1:{port}", "d0", "decode", token="secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.join()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await node.die()
    await server.stop(None)


async def test_a_mismatch_is_refused_with_its_reason(bench: Bench) -> None:
    async with bench.node("p0", "prefill"):
        other = bench.node("d0", "decode", changes={"model_digest": "ff"})
        with pytest.raises(ConfigError, match="model_digest 'ff', the cluster has 'abab"):
            await other.join()
        with pytest.raises(ConfigError, match="role 'cook'"):
            await bench.node("d0", "cook").join()
        assert bench.dispatcher.brain.counters.joins == {"joined": 1, "refused": 2}


async def test_the_first_message_must_be_join_and_come_soon(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert JOIN_TIMEOUT == 5.0
    for first, patience, code in ((pb.NodeMessage(), 60.0, "INVALID_ARGUMENT"), (None, 0.05, "DEADLINE_EXCEEDED")):
        monkeypatch.setattr("coordinator.node_link.JOIN_TIMEOUT", patience)
        node = bench.node("p0", "prefill")
        call = node.dial()
        if first is not None:
            await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code().name == code
        await node.die()


async def test_a_silent_node_is_given_up_and_may_come_back() -> None:
    async with coordinator(silence=1.0, heartbeat=0.05) as bench, bench.node("d0", "decode") as decode:
        await decode.ended()
        assert bench.dispatcher.links == {}
        assert bench.dispatcher.brain.counters.nodes_lost == {"node_gone": 1}
        assert decode.pings > 1
        await decode.join()
        assert len(bench.dispatcher.links) == 1


async def test_a_node_that_reads_nothing_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.node_link.MAX_UNSENT", 3)
    async with bench.node("d0", "decode") as decode:
        link = bench.dispatcher.links[decode.incarnation]  # type: ignore[index]
        for _ in range(5):  # in one turn of the loop: nothing can leave meanwhile
            link.send(pb.CoordinatorMessage(ping=pb.Ping()))
        await decode.ended()
        assert bench.dispatcher.links == {}


async def test_a_node_that_misbehaves_costs_only_its_attempt(bench: Bench) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 4)
        for attempt in (1, 2):
            key = key_from_pb((await decode.order("submit")).work.key)
            assert key.attempt == attempt
            await decode.tokens(key, 3, [1], None)
            assert key_from_pb((await decode.order("cancel")).key) == key
        stream.cancel()


async def test_attempts_run_out() -> None:
    async with coordinator(max_attempts=3) as bench, bench.working("p0"), bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 4)
        for _ in range(3):
            key = key_from_pb((await decode.order("submit")).work.key)
            await decode.failed(key, LeaseExpired("the ticket was not renewed"))
        with pytest.raises(LeaseExpired, match="not renewed"):
            await collect(stream)


async def test_cancelling_reaches_both_nodes(bench: Bench) -> None:
    async with bench.node("p0", "prefill") as prefill, bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 4)
        stream.cancel()
        stream.cancel()
        for node, kind in ((prefill, "prefill"), (decode, "submit")):
            await node.order(kind)
            assert (await node.order("cancel")).reason.code == "cancelled"
        with pytest.raises(Cancelled):
            await collect(stream)


async def test_the_deadline_ends_a_request_and_its_work(bench: Bench) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 4, seconds=0.5)
        assert 0.0 < (await decode.order("submit")).work.timeout_seconds < 0.501
        with pytest.raises(DeadlineExceeded, match=r"0\.5 s"):
            await collect(stream)
        assert (await decode.order("cancel")).reason.code == "deadline_exceeded"


async def test_a_slow_reader_is_cut_off(bench: Bench) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode") as decode:
        stream = await bench.submit(PROMPT, 200)
        key = key_from_pb((await decode.order("submit")).work.key)
        assert MAX_UNREAD > 200
        stream._unread = MAX_UNREAD  # as if a long answer had gone unread
        await decode.tokens(key, 0, [5], None)
        assert (await decode.order("cancel")).reason.code == "slow_reader"
        with pytest.raises(SlowReader, match="1024 tokens unread"):
            await collect(stream)


async def test_without_nodes_requests_wait_a_second(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.core.requests.UNSERVED_PATIENCE", 0.2)
    with pytest.raises(Unavailable):
        bench.dispatcher.bounds()
    async with bench.working("p0"):
        with pytest.raises(Unavailable, match="no decode node") as caught:
            await bench.submit(PROMPT, 4)
        assert caught.value.retry_after is not None
        monkeypatch.setattr("coordinator.core.requests.UNSERVED_PATIENCE", 60.0)
        waiting = asyncio.create_task(bench.generate(PROMPT, 4))
        await asyncio.sleep(0)
        assert bench.dispatcher.brain.queued == 1
        async with bench.working("d0"):
            assert (await waiting)[0] == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("moment", ["unadmitted", "running"])
async def test_a_reader_that_is_cancelled_leaves_nothing_behind(bench: Bench, moment: str) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode") as decode:
        if moment == "unadmitted":
            await decode.die()
        reading = asyncio.create_task(bench.generate(PROMPT, 4))
        while not bench.dispatcher.brain.active():
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert bench.dispatcher.brain.active() == []


async def test_draining_lets_what_runs_end(bench: Bench) -> None:
    async with bench.working("p0", "d0", burst=1, gap=0.002):
        stream = await bench.submit(PROMPT, 20)
        drained = asyncio.create_task(bench.dispatcher.drain(60.0))
        assert (await collect(stream))[0] == expected_tokens(PROMPT, 20)
        await drained
        with pytest.raises(Draining):
            await bench.submit(PROMPT, 1)


async def test_draining_ends_what_takes_too_long(bench: Bench) -> None:
    async with bench.node("p0", "prefill"), bench.node("d0", "decode"):
        stream = await bench.submit(PROMPT, 20)
        await bench.dispatcher.drain(0.05)
        with pytest.raises(Draining, match="--drain-timeout"):
            await collect(stream)


@pytest.mark.parametrize("action", ["delay(0.01)", "duplicate*3"])
async def test_a_faulty_link_delivers_right_answers_or_none(bench: Bench, action: str) -> None:
    FAILPOINTS.arm(f"link.coordinator.send={action}")
    try:
        async with bench.working("p0", "d0"):
            assert (await bench.generate(PROMPT, 5))[0] == expected_tokens(PROMPT, 5)
    finally:
        FAILPOINTS.arm("")


class BlockedContext:
    """A stream that takes a message when `go` is set."""

    def __init__(self) -> None:
        self.began, self.go, self.taken = asyncio.Event(), asyncio.Event(), 0

    async def write(self, _: object) -> None:
        self.began.set()
        await self.go.wait()
        self.taken += 1


@pytest.mark.parametrize("takes", [True, False])
async def test_a_write_is_ended_before_its_stream_is_unless_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    monkeypatch.setattr(node_link, "_LAST_WRITE", 30.0 if takes else 0.01)
    context, stream = BlockedContext(), NodeStream(60.0)
    stream.send(pb.CoordinatorMessage(ping=pb.Ping()))
    draining = asyncio.create_task(stream.drain_to(context))
    await context.began.wait()
    draining.cancel()
    await asyncio.wait({draining}, timeout=0.01)
    if takes:
        context.go.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(draining, 20)
    assert context.taken == takes


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with coordinator() as bench:
        async with bench.working("p0", "d0"):
            streams = [await bench.submit(PROMPT, 100) for _ in range(20)]
            for stream in streams:
                stream.cancel()
    async with asyncio.timeout(30):
        while {task for task in asyncio.all_tasks() - before if not task.done()}:
            await asyncio.sleep(0.01)


async def test_a_repeated_message_is_skipped_and_a_lost_one_ends_the_stream(bench: Bench) -> None:
    async with bench.node("d0", "decode") as node:
        registry, dropped = bench.dispatcher.brain.registry, bench.dispatcher.brain.counters.dropped_messages
        incarnation = Incarnation(node.incarnation)

        def free() -> int:
            stats = registry.nodes[incarnation].stats
            return stats.blocks_free if stats else -1

        await node.heartbeat(blocks_free=5)
        node.numbers = Numbers()
        await node.heartbeat(blocks_free=6)  # number 1 again
        await node.heartbeat(blocks_free=7)
        await bench.until(lambda: free() == 7)
        assert dropped == {"repeated": 1}
        node.numbers.stamp(pb.NodeMessage())  # one goes astray
        await node.heartbeat()
        await node.ended()
        assert dropped["lost"] == 1
