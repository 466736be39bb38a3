"""Dispatcher and node link over real gRPC on loopback, against scripted nodes."""

import asyncio

import pytest

from baton.cluster_link.messages import Ping
from baton.cluster_link.order_codec import attempt_key_from_pb
from baton.cluster_link.stream import NodeStream, SequenceNumbers
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    LeaseExpired,
    ServiceUnavailable,
    ShuttingDown,
    SlowReader,
)
from baton.pb import cluster_pb2 as pb
from baton.process.failpoints import FAILPOINTS
from baton.types import FinishReason, Incarnation
from coordinator.generation import TokensEvent
from coordinator.node_links.dispatcher import MAX_UNREAD_TOKENS
from tests.fake_nodes import expected_tokens
from tests.integration.coordinator_harness import (
    CoordinatorHarness,
    collect_stream,
    running_coordinator,
)

PROMPT = tuple(range(1, 40))


async def test_request_goes_through_prefill_and_decode(coordinator: CoordinatorHarness) -> None:
    async with coordinator.run_nodes(
        "p0", "d0", gap=0.1
    ):  # in which prefill's report of the hand-off comes
        tokens, done = await coordinator.generate(PROMPT, 10)
        assert tokens == expected_tokens(PROMPT, 10)
        assert done.finish_reason is FinishReason.LENGTH
        timeline = done.timeline
        assert (timeline.prefill_node, timeline.decode_node, timeline.attempts) == ("p0", "d0", 1)
        assert timeline.handoff is not None
        assert timeline.handoff.bytes == 4096
        stages = (
            timeline.queue,
            timeline.reserve,
            timeline.prefill,
            timeline.transfer,
            timeline.first_token,
        )
        assert sum(stages) == timeline.ttft
        sources = coordinator.dispatcher.brain.counters.prompt_tokens
        assert {source for source, tokens in sources.items() if tokens} == {"computed_prefill"}
        assert sources["computed_prefill"] == len(PROMPT)


async def test_hundred_concurrent_requests_are_answered(coordinator: CoordinatorHarness) -> None:
    async with coordinator.run_nodes("p0", "p1", "d0", "d1"):
        prompts = [tuple(range(n, n + 5 + n % 40)) for n in range(1, 101)]
        answers = await asyncio.gather(
            *(coordinator.generate(prompt, 1 + n % 9) for n, prompt in enumerate(prompts))
        )
        for n, (prompt, (tokens, _)) in enumerate(zip(prompts, answers, strict=True)):
            assert tokens == expected_tokens(prompt, 1 + n % 9)
        assert (
            coordinator.dispatcher.brain.running_requests
            == coordinator.dispatcher.brain.queued_requests
            == 0
        )


async def test_colocated_request_is_answered() -> None:
    async with running_coordinator(prefill=0) as coordinator, coordinator.run_nodes("d0"):
        assert (await coordinator.generate(PROMPT, 3))[0] == expected_tokens(PROMPT, 3)


async def test_refused_request_is_retried_when_blocks_are_free(
    coordinator: CoordinatorHarness,
) -> None:
    async with (
        coordinator.make_node("p0", "prefill") as prefill,
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 4)
        submit = await decode.next_order("submit")
        assert (await prefill.next_order("prefill")).work == submit.work
        await decode.send_message(refused=pb.Refused(key=submit.work.key, needed=3, free=1))
        assert (await prefill.next_order("cancel")).key == submit.work.key
        await decode.send_heartbeat(blocks_free=2)
        await decode.send_heartbeat(blocks_free=3)
        again = await decode.next_order("submit")
        assert again.work.key.attempt == 2
        stream.cancel()


async def test_stream_survives_decode_node_loss(coordinator: CoordinatorHarness) -> None:
    async with coordinator.run_nodes("p0", "d0", "d1", burst=1, gap=0.001) as (_, d0, d1):
        stream = await coordinator.submit_request(PROMPT, 120)
        seen: list[int] = []
        async for event in stream:
            if isinstance(event, TokensEvent):
                seen += event.token_ids
                if len(seen) == 20:
                    (victim,) = [
                        node
                        for node in (d0, d1)
                        if coordinator.dispatcher.brain.count_attempts(
                            node.incarnation  # type: ignore[arg-type]
                        )
                    ]
                    await victim.drop_connection()
        assert tuple(seen) == expected_tokens(PROMPT, 120)
        assert coordinator.dispatcher.brain.counters.replaced_attempts == {"node_gone": 1}


async def test_prefill_node_loss_before_the_handoff_is_retried(
    coordinator: CoordinatorHarness,
) -> None:
    async with (
        coordinator.make_node("p0", "prefill") as prefill,
        coordinator.run_nodes("d0") as (decode,),
    ):
        waiting = asyncio.create_task(coordinator.generate(PROMPT, 4))
        old = prefill.incarnation
        await prefill.next_order("prefill")
        await prefill.next_order("ticket")
        await prefill.drop_connection()
        async with coordinator.run_nodes("p1"):
            tokens, done = await waiting
        assert tokens == expected_tokens(PROMPT, 4)
        assert done.timeline.attempts == 2
        assert old not in coordinator.dispatcher.node_connections
        assert {key.attempt_number for key in decode.cancelled_keys} == {1}


async def test_node_loss_is_announced_to_all_peers(coordinator: CoordinatorHarness) -> None:
    async with (
        coordinator.make_node("p0", "prefill") as p0,
        coordinator.make_node("d0", "decode") as d0,
        coordinator.make_node("d1", "decode") as d1,
    ):
        gone = d0.incarnation
        await d0.drop_connection()
        for node in (p0, d1):
            assert (await node.next_order("peer_gone")).incarnation == gone


async def test_a_message_of_another_incarnation_ends_the_stream(
    coordinator: CoordinatorHarness,
) -> None:
    async with (
        coordinator.make_node("p0", "prefill"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 4)
        submit = await decode.next_order("submit")
        await decode.send_message(
            incarnation="0123456789abcdef", reserved=pb.Reserved(key=submit.work.key)
        )
        await decode.wait_stream_end()
        assert coordinator.dispatcher.brain.counters.dropped_messages["stale"] == 1
        stream.cancel()


async def test_silent_node_is_dropped_and_may_rejoin() -> None:
    async with (
        running_coordinator(silence=1.0, heartbeat=0.05) as coordinator,
        coordinator.make_node("d0", "decode") as decode,
    ):
        await decode.wait_stream_end()
        assert coordinator.dispatcher.node_connections == {}
        assert coordinator.dispatcher.brain.counters.lost_nodes == {"node_gone": 1}
        assert decode.ping_count > 1
        await decode.join()
        assert len(coordinator.dispatcher.node_connections) == 1


async def test_node_that_does_not_read_is_dropped(
    coordinator: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cluster_link.stream.MAX_UNSENT_MESSAGES", 3)
    async with coordinator.make_node("d0", "decode") as decode:
        link = coordinator.dispatcher.node_connections[decode.incarnation]  # type: ignore[index]
        for _ in range(5):  # in one turn of the loop: nothing can leave meanwhile
            link.send_order(Ping())
        await decode.wait_stream_end()
        assert coordinator.dispatcher.node_connections == {}


async def test_invalid_tokens_message_fails_only_its_attempt(
    coordinator: CoordinatorHarness,
) -> None:
    async with (
        coordinator.make_node("p0", "prefill"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 4)
        for attempt in (1, 2):
            key = attempt_key_from_pb((await decode.next_order("submit")).work.key)
            assert key.attempt_number == attempt
            await decode.send_tokens(key, 3, [1], None)
            assert attempt_key_from_pb((await decode.next_order("cancel")).key) == key
        stream.cancel()


async def test_request_fails_after_max_attempts() -> None:
    async with (
        running_coordinator(max_attempts=3) as coordinator,
        coordinator.run_nodes("p0"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 4)
        for _ in range(3):
            key = attempt_key_from_pb((await decode.next_order("submit")).work.key)
            await decode.send_failed(key, LeaseExpired("the ticket was not renewed"))
        with pytest.raises(LeaseExpired, match="not renewed"):
            await collect_stream(stream)


async def test_cancel_reaches_both_nodes(coordinator: CoordinatorHarness) -> None:
    async with (
        coordinator.make_node("p0", "prefill") as prefill,
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 4)
        stream.cancel()
        stream.cancel()
        for node, kind in ((prefill, "prefill"), (decode, "submit")):
            await node.next_order(kind)
            assert (await node.next_order("cancel")).reason.code == "cancelled"
        with pytest.raises(Cancelled):
            await collect_stream(stream)


async def test_the_deadline_ends_a_request_and_its_work(coordinator: CoordinatorHarness) -> None:
    async with (
        coordinator.make_node("p0", "prefill"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 4, seconds=0.5)
        assert 0.0 < (await decode.next_order("submit")).work.timeout_seconds < 0.501
        with pytest.raises(DeadlineExceeded, match=r"0\.5 s"):
            await collect_stream(stream)
        assert (await decode.next_order("cancel")).reason.code == "deadline_exceeded"


async def test_a_slow_reader_is_cut_off(coordinator: CoordinatorHarness) -> None:
    async with (
        coordinator.make_node("p0", "prefill"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        stream = await coordinator.submit_request(PROMPT, 200)
        key = attempt_key_from_pb((await decode.next_order("submit")).work.key)
        assert MAX_UNREAD_TOKENS > 200
        stream._unread_tokens = MAX_UNREAD_TOKENS  # as if a long answer had gone unread
        await decode.send_tokens(key, 0, [5], None)
        assert (await decode.next_order("cancel")).reason.code == "slow_reader"
        with pytest.raises(SlowReader, match="1024 tokens unread"):
            await collect_stream(stream)


async def test_requests_wait_briefly_for_a_missing_role(
    coordinator: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.core.requests.table.ADMIT_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(ServiceUnavailable):
        coordinator.dispatcher.get_model_bounds()
    async with coordinator.run_nodes("p0"):
        with pytest.raises(ServiceUnavailable, match="no decode node") as caught:
            await coordinator.submit_request(PROMPT, 4)
        assert caught.value.retry_after is not None
        monkeypatch.setattr("coordinator.core.requests.table.ADMIT_TIMEOUT_SECONDS", 60.0)
        waiting = asyncio.create_task(coordinator.generate(PROMPT, 4))
        await asyncio.sleep(0)
        assert coordinator.dispatcher.brain.queued_requests == 1
        async with coordinator.run_nodes("d0"):
            assert (await waiting)[0] == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("moment", ["unadmitted", "running"])
async def test_cancelled_reader_leaves_no_request(
    coordinator: CoordinatorHarness, moment: str
) -> None:
    async with (
        coordinator.make_node("p0", "prefill"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        if moment == "unadmitted":
            await decode.drop_connection()
        reading = asyncio.create_task(coordinator.generate(PROMPT, 4))
        while not coordinator.dispatcher.brain.list_active_requests():
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert coordinator.dispatcher.brain.list_active_requests() == []


async def test_drain_finishes_running_requests(coordinator: CoordinatorHarness) -> None:
    async with coordinator.run_nodes("p0", "d0", burst=1, gap=0.002):
        stream = await coordinator.submit_request(PROMPT, 20)
        drained = asyncio.create_task(coordinator.dispatcher.drain_requests(60.0))
        assert (await collect_stream(stream))[0] == expected_tokens(PROMPT, 20)
        await drained
        with pytest.raises(ShuttingDown):
            await coordinator.submit_request(PROMPT, 1)


async def test_drain_timeout_ends_running_requests(coordinator: CoordinatorHarness) -> None:
    async with coordinator.make_node("p0", "prefill"), coordinator.make_node("d0", "decode"):
        stream = await coordinator.submit_request(PROMPT, 20)
        await coordinator.dispatcher.drain_requests(0.05)
        with pytest.raises(ShuttingDown, match="--drain-timeout"):
            await collect_stream(stream)


@pytest.mark.parametrize("action", ["delay(0.01)", "duplicate*3"])
async def test_delayed_or_repeated_messages_do_not_change_answers(
    coordinator: CoordinatorHarness, action: str
) -> None:
    FAILPOINTS.arm(f"link.coordinator.send={action}")
    try:
        async with coordinator.run_nodes("p0", "d0"):
            assert (await coordinator.generate(PROMPT, 5))[0] == expected_tokens(PROMPT, 5)
    finally:
        FAILPOINTS.arm("")


class BlockedStreamContext:
    """A stream that takes a message when `unblocked` is set."""

    def __init__(self) -> None:
        self.write_started, self.unblocked, self.written = asyncio.Event(), asyncio.Event(), 0

    async def write(self, _: object) -> None:
        self.write_started.set()
        await self.unblocked.wait()
        self.written += 1


@pytest.mark.parametrize("takes", [True, False])
async def test_pending_write_is_finished_before_the_stream_closes(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    monkeypatch.setattr("baton.cluster_link.stream._LAST_WRITE_SECONDS", 30.0 if takes else 0.01)
    context, stream = BlockedStreamContext(), NodeStream(60.0)
    stream.send_order(Ping())
    draining = asyncio.create_task(stream.write_messages(context))
    await context.write_started.wait()
    draining.cancel()
    await asyncio.wait({draining}, timeout=0.01)
    if takes:
        context.unblocked.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(draining, 20)
    assert context.written == takes


async def test_no_task_is_left_behind() -> None:
    before = asyncio.all_tasks()
    async with running_coordinator() as coordinator:
        async with coordinator.run_nodes("p0", "d0"):
            streams = [await coordinator.submit_request(PROMPT, 100) for _ in range(20)]
            for stream in streams:
                stream.cancel()
    async with asyncio.timeout(30):
        while {task for task in asyncio.all_tasks() - before if not task.done()}:
            await asyncio.sleep(0.01)


async def test_a_repeated_message_is_skipped_and_a_lost_one_ends_the_stream(
    coordinator: CoordinatorHarness,
) -> None:
    async with coordinator.make_node("d0", "decode") as node:
        registry, dropped = (
            coordinator.dispatcher.brain.node_registry,
            coordinator.dispatcher.brain.counters.dropped_messages,
        )
        incarnation = Incarnation(node.incarnation)

        def free() -> int:
            stats = registry.nodes[incarnation].stats
            return stats.blocks_free if stats else -1

        await node.send_heartbeat(blocks_free=5)
        node.sequence_numbers = SequenceNumbers()
        await node.send_heartbeat(blocks_free=6)  # number 1 again
        await node.send_heartbeat(blocks_free=7)
        await coordinator.wait_until(lambda: free() == 7)
        assert dropped == {"repeated": 1}
        node.sequence_numbers.number_message(pb.NodeMessage())  # one goes astray
        await node.send_heartbeat()
        await node.wait_stream_end()
        assert dropped["lost"] == 1
