"""Which requests are admitted or wait, and which node computes the prompt in each mode."""

import pytest

from baton.cluster_link.messages import DecodeOrder
from baton.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Overloaded,
    ServiceUnavailable,
    ShuttingDown,
)
from baton.types import DEFAULT_PRINCIPAL, FinishReason, Incarnation
from coordinator.core.common.effects import AdmitRequest, FinishedResult
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    PREFILL,
    BrainHarness,
    stream_first_token,
)


def test_too_long_prompt_is_rejected_with_nothing_allocated(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    with pytest.raises(
        ContextLengthExceeded,
        match=r"7 after a prompt of 250: together the limit is 256 \(raise --max-model-len",
    ):
        world.submit(prompt=250, max_tokens=7)
    assert world.brain.list_active_requests() == []
    assert world.brain.counters.rejected == {("context_length_exceeded", "default"): 1}


def test_kv_cache_size_bounds_request_length(world: BrainHarness, p0: Incarnation) -> None:
    world.join_node("d1", DECODE, num_blocks=4)
    with pytest.raises(ContextLengthExceeded, match=r"the limit is 64 .*: raise --kv-memory"):
        world.submit(prompt=64, max_tokens=1)


def test_full_queue_rejects_with_retry_after() -> None:
    world = BrainHarness(max_queue=2)
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE, max_num_seqs=1)
    world.submit()
    for _ in range(4):  # one a second leaves the queue
        world.submit()
        world.now += 1.0
        world.cancel(world.last_attempt_key(d0).request_id)
    world.submit()
    world.submit()
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2") as caught:
        world.submit()
    assert caught.value.retry_after == pytest.approx(2.0, abs=1.0)


def test_queued_prompt_tokens_are_bounded() -> None:
    world = BrainHarness(max_queue=64, max_queue_tokens=100)
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE, max_num_seqs=1)
    world.submit()
    for _ in range(2):
        world.submit(prompt=40)
    assert world.brain.queued_tokens == 80
    with pytest.raises(
        Overloaded,
        match=r"80 prompt tokens are waiting, 21 more .* the limit is 100 .*max-queue-tokens",
    ):
        world.submit(prompt=21)
    with pytest.raises(Overloaded, match="80 prompt tokens are waiting"):
        world.submit_all(world.make_request(prompt=11), world.make_request(prompt=10))
    world.submit(prompt=20)
    with pytest.raises(Overloaded, match="100 prompt tokens are waiting"):
        world.brain.require_admission(DEFAULT_PRINCIPAL, 1, 60.0, world.now)
    for _ in range(4):
        world.cancel(world.last_attempt_key(d0).request_id)
    assert world.brain.queued_tokens == 0
    world.submit(prompt=20)


def test_prompt_beyond_token_bound_is_admitted_to_empty_queue() -> None:
    world = BrainHarness(max_queue_tokens=10)
    world.join_node("p0", PREFILL)
    world.join_node("d0", DECODE)
    world.submit(prompt=20)


def test_requests_are_unavailable_before_first_join(world: BrainHarness) -> None:
    with pytest.raises(ServiceUnavailable):
        world.submit()


def test_new_requests_wait_admit_timeout_for_decode_node(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.lose_node(d0)
    lost, saved = world.submit(), None
    world.advance(0.6)
    saved = world.submit()
    world.advance(0.5)
    error = world.end_error(lost)
    assert isinstance(error, ServiceUnavailable)
    assert error.retry_after == 1.0
    assert "no decode node" in error.message
    world.join_node("new", DECODE)
    assert world.brain.get_request_state(saved) is RequestState.PLACED
    admitted = [effect.request_id for effect in world.effects if isinstance(effect, AdmitRequest)]
    assert admitted == [saved]


def test_admitted_requests_wait_for_nodes_until_their_deadline(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(timeout=20.0)
    world.lose_node(d0)
    world.lose_node(p0)
    world.advance(19.9)
    assert world.end_events(request) == []
    world.advance(0.2)
    assert isinstance(world.end_error(request), DeadlineExceeded)


def test_draining_rejects_new_and_finishes_running_requests(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=2)
    world.brain.start_draining()
    with pytest.raises(ShuttingDown):
        world.submit()
    key = stream_first_token(world, p0, d0)
    world.report_token(d0, key, 1, finish=FinishReason.LENGTH)
    assert isinstance(world.end_event(request).result, FinishedResult)


# modes


def test_colocated_needs_no_prefill_node() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    request = world.submit(max_tokens=1)
    (submit,) = world.messages_to(d0, DecodeOrder)
    assert submit.kv_writer is None
    world.report_token(d0, submit.work.key, 0, finish=FinishReason.LENGTH)
    assert isinstance(world.end_event(request).result, FinishedResult)


def test_colocated_prefill_has_no_answer_deadline() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    request = world.submit()
    world.advance(40.0)
    assert world.last_attempt_key(d0) == (request, 1, 0)
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_auto_uses_prefill_nodes_while_there_are_any() -> None:
    world = BrainHarness(mode="auto")
    d0 = world.join_node("d0", DECODE)
    world.submit()
    assert world.messages_to(d0, DecodeOrder)[-1].kv_writer is None
    p0 = world.join_node("p0", PREFILL)
    world.submit()
    writer = world.messages_to(d0, DecodeOrder)[-1].kv_writer
    assert writer is not None
    assert writer.incarnation == p0


def make_slow_outputs_expected(
    world: BrainHarness, prefill: Incarnation, decode: Incarnation
) -> None:
    """Finish a request whose output of four tokens took 30 s."""
    world.submit(max_tokens=4)
    key = stream_first_token(world, prefill, decode)
    world.now += 30.0
    for index in (1, 2, 3):
        finish = FinishReason.LENGTH if index == 3 else None
        world.report_token(decode, key, index, finish=finish)


def test_requests_that_find_places_together_need_no_time_for_their_outputs(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    make_slow_outputs_expected(world, p0, d0)
    world.submit_all(*(world.make_request(timeout=10.0) for _ in range(3)))
    assert world.count_placed() == 2 * 3


def test_request_without_time_for_its_output_gives_way_to_those_that_wait() -> None:
    world = BrainHarness()
    prefill = world.join_node("p0", PREFILL)
    decode = world.join_node("d0", DECODE, max_num_seqs=1)
    make_slow_outputs_expected(world, prefill, decode)
    world.submit()
    hurried = world.submit(timeout=10.0)
    patient = world.submit(timeout=60.0)
    error = world.end_error(hurried)
    assert isinstance(error, DeadlineExceeded)
    assert "its output about 20 s: 10 s are left, and other requests wait" in error.message
    assert world.end_events(patient) == []
