"""Who may join, and who is given up."""

from dataclasses import replace
from typing import Any

import pytest

from baton.cluster_link.messages import (
    PROTOCOL_VERSION,
    NodeLeaving,
    PeerLostNotice,
    ReservationRefused,
)
from baton.errors import ConfigError, NodeLost, NodeStalled
from baton.kv.blocks import KVLayout
from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.common.effects import MemberLost
from coordinator.core.requests.record import RequestState
from simulator.node_messages import make_join_info
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    LAYOUT,
    PREFILL,
    SILENCE,
    STALL,
    BrainHarness,
)


def layout(**changes: Any) -> KVLayout:
    fields = {name: getattr(LAYOUT, name) for name in KVLayout.__slots__}
    return KVLayout(**(fields | changes))


MISMATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "protocol_version": (
        {"protocol_version": PROTOCOL_VERSION + 1},
        str(PROTOCOL_VERSION + 1),
        str(PROTOCOL_VERSION),
    ),
    "implementation": ({"implementation": "native"}, "'native'", "'paced'"),
    "dtype": ({"dtype": "bfloat16"}, "'bfloat16'", "'float32'"),
    "quantization": ({"quantization": "fp8"}, "'fp8'", "'none'"),
    "model_digest": ({"model_digest": "cd"}, "'cd'", "'ab'"),
    "vocab_size": ({"vocab_size": 999}, "999", "1000"),
    "eos_token_ids": ({"eos_token_ids": (2, 3)}, "(2, 3)", "(2,)"),
    "layout.num_layers": ({"layout": layout(num_layers=3)}, "3", "2"),
    "layout.num_kv_heads": ({"layout": layout(num_kv_heads=2)}, "2", "1"),
    "layout.head_dim": ({"layout": layout(head_dim=8)}, "8", "4"),
    "layout.block_size": ({"layout": layout(block_size=32)}, "32", "16"),
    "layout.dtype": ({"layout": layout(dtype="bfloat16")}, "'bfloat16'", "'float32'"),
}


def test_every_identity_field_is_compared_and_part_of_the_digest() -> None:
    info = make_join_info("p0", PREFILL)
    assert MISMATCHES.keys() - {"protocol_version"} == info.model.named_fields().keys()
    others = [replace(info, **changes).model.digest for field, (changes, *_) in MISMATCHES.items()]
    assert len({info.model.digest, *others}) == len(
        MISMATCHES
    )  # the version of the protocol is no part of it


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_mismatch_is_refused_naming_field_and_both_values(field: str) -> None:
    changes, mine, theirs = MISMATCHES[field]
    world = BrainHarness()
    world.join_node("p0", PREFILL)
    with pytest.raises(ConfigError) as caught:
        world.join_node("d0", DECODE, **changes)
    assert caught.value.param == field
    assert f"node 'd0' has {field} {mine}, the cluster has {theirs}" in caught.value.message
    assert [node.info.name for node in world.brain.node_registry.nodes.values()] == ["p0"]
    assert world.brain.counters.joins == {"joined": 1, "refused": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "1 to 128 printable"),
        ({"name": "x" * 129}, "1 to 128 printable"),
        ({"name": "a\nb"}, "1 to 128 printable"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"max_batched_tokens": 0}, "max_batched_tokens 0"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"layout": layout(block_size=0)}, "layout.block_size 0"),
    ],
)
def test_invalid_join_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BrainHarness().brain.join_node(
            replace(make_join_info("p0", PREFILL), **changes), Incarnation("p0#1"), 0.0
        )


def test_model_identity_ends_with_last_node() -> None:
    world = BrainHarness()
    node = world.join_node("p0", PREFILL)
    world.lose_node(node)
    world.join_node("p1", PREFILL, model_digest="cd")
    with pytest.raises(ConfigError):
        world.join_node("d0", DECODE)


def test_lone_node_may_rejoin_with_other_model() -> None:
    world = BrainHarness()
    old = world.join_node("p0", PREFILL)
    world.join_node("p0", PREFILL, model_digest="cd")
    assert old not in world.brain.node_registry.nodes


def test_rejoin_replaces_old_incarnation() -> None:
    world = BrainHarness()
    p0, old = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    request = world.submit()
    new = world.join_node("d0", DECODE)
    assert world.messages_to(p0, PeerLostNotice) == [PeerLostNotice(old)]
    assert world.messages_to(new, PeerLostNotice) == []
    lost = [effect.incarnation for effect in world.effects if isinstance(effect, MemberLost)]
    assert lost == [old]
    assert world.last_attempt_key(new) == (request, 2, 0)


def test_refused_join_replaces_no_member() -> None:
    world = BrainHarness()
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    with pytest.raises(ConfigError):
        world.join_node("d0", DECODE, model_digest="cd")
    assert d0 in world.brain.node_registry.nodes


def test_silent_node_is_dropped_after_silence_timeout() -> None:
    world = BrainHarness()
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    world.advance(3.0, beating=False)
    world.send_heartbeat(p0)
    assert world.brain.next_tick_at() == 100.0 + SILENCE
    effects = world.advance(2.0, beating=False)
    (lost,) = (effect for effect in effects if isinstance(effect, MemberLost))
    assert lost.incarnation == d0
    assert isinstance(lost.error, NodeLost)
    assert "silent for 5.0 s" in lost.error.message
    assert list(world.brain.node_registry.nodes) == [p0]


def test_any_message_breaks_the_silence() -> None:
    world = BrainHarness()
    p0 = world.join_node("p0", PREFILL)
    world.advance(4.0, beating=False)
    world.send_from_node(p0, ReservationRefused(AttemptKey(RequestId("nobody"), 1, 0), 1, 1))
    assert world.advance(4.0, beating=False) == []


def test_next_silence_check_finds_silent_node_in_time() -> None:
    """Many are heard all the time, one is heard no more: looks come early, never late, and not in a
    rush."""
    world = BrainHarness()
    nodes = [world.join_node(f"p{number}", PREFILL) for number in range(4)]
    began, looks = world.now, 0
    world.advance(1.5, beating=False)
    world.send_heartbeat(nodes[0])
    last = world.now
    while nodes[0] in world.brain.node_registry.nodes:
        for node in nodes[1:]:
            world.send_heartbeat(node)
        due = world.brain.next_tick_at()
        assert due is not None
        world.advance(min(due, world.now + 1.0) - world.now, beating=False)
        looks += 1
    assert world.now == last + SILENCE
    assert looks <= world.now - began + 3
    assert len(world.brain.node_registry.nodes) == 3


def test_stalled_busy_node_is_dropped() -> None:
    world = BrainHarness()
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = world.submit()
    world.send_heartbeat(d0, running=1, progress_age_seconds=STALL)
    assert world.advance(0.1) == []
    world.send_heartbeat(d0, running=1, progress_age_seconds=STALL + 1)
    lost = [effect for effect in world.advance(0.1) if isinstance(effect, MemberLost)]
    assert [(effect.incarnation, type(effect.error)) for effect in lost] == [(d0, NodeStalled)]
    assert world.brain.get_request_state(request) is RequestState.QUEUED


def test_stalled_idle_node_gets_no_work_and_may_recover() -> None:
    world = BrainHarness()
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE, rejoining="before")
    assert world.brain.why_not_serving() == "there is no decode node"  # it has not spoken yet
    world.send_heartbeat(d0, progress_age_seconds=STALL + 1)
    request = world.submit()
    assert world.advance(0.1) == []  # nothing is placed there: not given up
    assert world.brain.get_request_state(request) is RequestState.QUEUED
    world.send_heartbeat(d0)
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_leaving_node_finishes_its_work_only() -> None:
    world = BrainHarness()
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = world.submit()
    world.send_from_node(d0, NodeLeaving("stopping"))
    d1 = world.join_node("d1", DECODE)
    world.submit()
    assert world.brain.count_attempts(d0) == world.brain.count_attempts(d1) == 1
    world.report_reserved(d0, world.last_attempt_key(d0), None)
    world.report_token(d0, world.last_attempt_key(d0), 0)
    assert world.emitted_tokens(request) == [7]
