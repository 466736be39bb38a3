"""Who may join, and who is given up."""

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ConfigError, NodeGone, Stalled
from baton.kv_layout import KVLayout
from baton.types import AttemptKey, Incarnation, RequestId
from baton.wire import PROTOCOL_VERSION
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.world import DECODE, LAYOUT, PREFILL, SILENCE, STALL, World, join_info


def layout(**changes: Any) -> KVLayout:
    fields = {name: getattr(LAYOUT, name) for name in KVLayout.__slots__}
    return KVLayout(**(fields | changes))


MISMATCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "protocol_version": ({"protocol_version": PROTOCOL_VERSION + 1}, str(PROTOCOL_VERSION + 1), str(PROTOCOL_VERSION)),
    "implementation": ({"implementation": "native"}, "'native'", "'paced'"),
    "dtype": ({"dtype": "bfloat16"}, "'bfloat16'", "'float32'"),
    "quantization": ({"quantization": "int8"}, "'int8'", "'none'"),
    "model_digest": ({"model_digest": "cd"}, "'cd'", "'ab'"),
    "vocab_size": ({"vocab_size": 999}, "999", "1000"),
    "eos_token_ids": ({"eos_token_ids": (2, 3)}, "(2, 3)", "(2,)"),
    "layout.num_layers": ({"layout": layout(num_layers=3)}, "3", "2"),
    "layout.num_kv_heads": ({"layout": layout(num_kv_heads=2)}, "2", "1"),
    "layout.head_dim": ({"layout": layout(head_dim=8)}, "8", "4"),
    "layout.block_size": ({"layout": layout(block_size=32)}, "32", "16"),
    "layout.dtype": ({"layout": layout(dtype="bfloat16")}, "'bfloat16'", "'float32'"),
}


def test_every_field_of_the_identity_is_compared_and_part_of_the_digest() -> None:
    info = join_info("p0", PREFILL)
    assert MISMATCHES.keys() - {"protocol_version"} == info.model.fields().keys()
    others = [replace(info, **changes).model.digest() for field, (changes, *_) in MISMATCHES.items()]
    assert len({info.model.digest(), *others}) == len(MISMATCHES)  # the version of the protocol is no part of it


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_mismatch_is_refused_naming_field_and_both_values(field: str) -> None:
    changes, mine, theirs = MISMATCHES[field]
    world = World()
    world.join("p0", PREFILL)
    with pytest.raises(ConfigError) as caught:
        world.join("d0", DECODE, **changes)
    assert caught.value.param == field
    assert f"node 'd0' has {field} {mine}, the cluster has {theirs}" in caught.value.message
    assert [node.info.name for node in world.brain.registry.nodes.values()] == ["p0"]
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
def test_nonsense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        World().brain.join(replace(join_info("p0", PREFILL), **changes), Incarnation("p0#1"), 0.0)


def test_the_identity_goes_with_the_last_node() -> None:
    world = World()
    node = world.join("p0", PREFILL)
    world.gone(node)
    world.join("p1", PREFILL, model_digest="cd")
    with pytest.raises(ConfigError):
        world.join("d0", DECODE)


def test_a_lone_process_may_come_back_with_another_model() -> None:
    world = World()
    old = world.join("p0", PREFILL)
    world.join("p0", PREFILL, model_digest="cd")
    assert old not in world.brain.registry.nodes


def test_joining_anew_replaces_the_old_incarnation() -> None:
    world = World()
    p0, old = world.join("p0", PREFILL), world.join("d0", DECODE)
    request = world.submit()
    new = world.join("d0", DECODE)
    assert world.sent(p0, m.PeerGone) == [m.PeerGone(old)]
    assert world.sent(new, m.PeerGone) == []
    lost = [effect.node for effect in world.effects if isinstance(effect, m.Lost)]
    assert lost == [old]
    assert world.key(new) == (request, 2, 0)


def test_a_refused_node_replaces_nobody() -> None:
    world = World()
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    with pytest.raises(ConfigError):
        world.join("d0", DECODE, model_digest="cd")
    assert d0 in world.brain.registry.nodes


def test_a_silent_node_is_given_up_when_its_time_has_come() -> None:
    world = World()
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    world.advance(3.0, beating=False)
    world.beat(p0)
    assert world.brain.next_due() == 100.0 + SILENCE
    effects = world.advance(2.0, beating=False)
    (lost,) = (effect for effect in effects if isinstance(effect, m.Lost))
    assert lost.node == d0
    assert isinstance(lost.error, NodeGone)
    assert "silent for 5.0 s" in lost.error.message
    assert list(world.brain.registry.nodes) == [p0]


def test_any_message_breaks_the_silence() -> None:
    world = World()
    p0 = world.join("p0", PREFILL)
    world.advance(4.0, beating=False)
    world.say(p0, m.Refused(AttemptKey(RequestId("nobody"), 1, 0), 1, 1))
    assert world.advance(4.0, beating=False) == []


def test_whoever_looks_when_told_finds_a_silent_node_the_moment_that_it_is_one() -> None:
    """Many are heard all the time, one is heard no more: looks come early, never late, and not in a rush."""
    world = World()
    nodes = [world.join(f"p{number}", PREFILL) for number in range(4)]
    began, looks = world.now, 0
    world.advance(1.5, beating=False)
    world.beat(nodes[0])
    last = world.now
    while nodes[0] in world.brain.registry.nodes:
        for node in nodes[1:]:
            world.beat(node)
        due = world.brain.next_due()
        assert due is not None
        world.advance(min(due, world.now + 1.0) - world.now, beating=False)
        looks += 1
    assert world.now == last + SILENCE
    assert looks <= world.now - began + 3
    assert len(world.brain.registry.nodes) == 3


def test_a_node_that_stands_still_with_work_is_given_up() -> None:
    world = World()
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    request = world.submit()
    world.beat(d0, running=1, progress_age_seconds=STALL)
    assert world.advance(0.1) == []
    world.beat(d0, running=1, progress_age_seconds=STALL + 1)
    lost = [effect for effect in world.advance(0.1) if isinstance(effect, m.Lost)]
    assert [(effect.node, type(effect.error)) for effect in lost] == [(d0, Stalled)]
    assert world.brain.state(request) is RequestState.QUEUED


def test_a_node_that_stands_still_is_given_nothing_and_may_recover() -> None:
    world = World()
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE, rejoining="before")
    assert world.brain.missing() == "there is no decode node"  # it has not spoken yet
    world.beat(d0, progress_age_seconds=STALL + 1)
    request = world.submit()
    assert world.advance(0.1) == []  # nothing is placed there: not given up
    assert world.brain.state(request) is RequestState.QUEUED
    world.beat(d0)
    assert world.brain.state(request) is RequestState.PLACED


def test_a_leaving_node_finishes_what_it_has_and_gets_nothing_new() -> None:
    world = World()
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    request = world.submit()
    world.say(d0, m.Leaving("stopping"))
    d1 = world.join("d1", DECODE)
    world.submit()
    assert world.brain.placed_on(d0) == world.brain.placed_on(d1) == 1
    world.reserve(d0, world.key(d0), None)
    world.token(d0, world.key(d0), 0)
    assert world.tokens(request) == [7]
