"""Pools as members: told apart from nodes, heard, given up, and counted for the nodes of their host."""

from dataclasses import replace

import pytest

from baton.block_hash import chain, root_hash, short_name
from baton.errors import ConfigError, NodeGone
from baton.kv_layout import KVLayout
from baton.pb.cluster_pb2 import NodeStats
from baton.pool_terms import Elsewhere
from baton.types import AttemptKey, Incarnation, NodeName, PeerAddress, Request, RequestId, Role, SamplingParams, Work
from baton.wire import PROTOCOL_VERSION
from coordinator.core.brain import Brain
from coordinator.core.identity import JoinInfo
from coordinator.core.messages import (
    CacheEvents,
    CacheQuery,
    CacheSnapshot,
    Heartbeat,
    Lost,
    Prefill,
    Send,
    Submit,
    Tokens,
)
from coordinator.core.policies import POLICIES
from coordinator.core.pools import PoolInfo
from coordinator.core.registry import Registry
from coordinator.core.settings import Settings
from coordinator.node_messages import order_to_pb
from node_engine.core import messages
from node_engine.host.commands import command_from_pb

LAYOUT = KVLayout(2, 2, 16, 4, "float32")
SILENCE = 5.0
POOL = PoolInfo(PROTOCOL_VERSION, NodeName("pool-0"), "host-a", "127.0.0.1:1", 7, "ab" * 32, LAYOUT, 100, "p")
HERE, THERE = Incarnation("1" * 16), Incarnation("2" * 16)
AS_POOL = Incarnation("3" * 16)


def brain() -> Brain:
    made = Brain(Registry(SILENCE, 15.0), POLICIES["prefix_aware"](), Settings("disaggregated", 10, 8, 15.0, 10))
    for incarnation, name, host in ((HERE, "decode-0", "host-a"), (THERE, "decode-1", "host-b")):
        made.join(node(name, host), incarnation, 0.0)
    return made


def node(name: str, host: str) -> JoinInfo:
    return JoinInfo(
        protocol_version=PROTOCOL_VERSION,
        name=NodeName(name),
        role=Role.DECODE,
        host_id=host,
        transfer_endpoint="",
        pid=1,
        model_digest="ab" * 32,
        layout=LAYOUT,
        num_blocks=50,
        max_num_seqs=8,
        max_batched_tokens=128,
        max_model_len=200,
        vocab_size=1000,
        eos_token_ids=(2,),
        engine="model",
        process=name,
    )


def test_nothing_is_placed_on_a_pool_and_no_bound_follows_from_it() -> None:
    made = brain()
    before = made.bounds()
    made.join_pool(replace(POOL, num_blocks=1), AS_POOL, 0.0)
    assert made.bounds() == before
    assert AS_POOL not in made.registry.nodes
    assert {member.info.name for member in made.members()} == {"decode-0", "decode-1", "pool-0"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_digest", "cd" * 32),
        ("layout", replace(LAYOUT, block_size=8)),
        ("protocol_version", 0),
        ("num_blocks", 0),
        ("name", ""),
    ],
)
def test_one_that_does_not_belong_is_refused_by_field(field: str, value: object) -> None:
    made = brain()
    with pytest.raises(ConfigError, match=field):
        made.join_pool(replace(POOL, **{field: value}), AS_POOL, 0.0)  # type: ignore[arg-type]
    assert made.counters.joins["refused"] == 1


def test_what_a_pool_has_counts_for_the_nodes_of_its_host() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    prompt = tuple(range(12))
    request = Request(RequestId("r"), prompt, SamplingParams(1), 10.0)
    root = root_hash(bytes.fromhex(POOL.model_digest), LAYOUT, b"")
    names = tuple(short_name(name) for name in chain(root, prompt, LAYOUT.block_size))
    made.receive(AS_POOL, CacheSnapshot(1, names[:2]), 1.0)
    knowledge = made.knowledge
    assert knowledge.held(knowledge.names_of(request)) == {HERE: 8}
    made.receive(HERE, CacheSnapshot(1, names), 1.0)
    assert knowledge.held(knowledge.names_of(request)) == {HERE: 12}, "the better of the two"
    made.receive(HERE, CacheEvents(2, (), names), 1.0)
    made.receive(AS_POOL, CacheEvents(2, (), names[1:2]), 1.0)
    assert knowledge.held(knowledge.names_of(request)) == {HERE: 4}
    made.node_gone(AS_POOL, NodeGone("gone"), 2.0)
    assert knowledge.held(knowledge.names_of(request)) == {}


def test_a_gap_in_its_events_is_asked_about() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    made.receive(AS_POOL, CacheSnapshot(1, ()), 1.0)
    assert Send(AS_POOL, CacheQuery()) in made.receive(AS_POOL, CacheEvents(3, (5,), ()), 1.0)


def test_a_silent_pool_is_given_up_and_one_that_is_heard_is_not() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    for one in (HERE, THERE):
        made.receive(one, Heartbeat(NodeStats()), SILENCE - 1)
    due = made.next_due()
    assert due is not None
    assert due <= SILENCE
    lost = [effect for effect in made.tick(SILENCE) if isinstance(effect, Lost)]
    assert [effect.name for effect in lost] == ["pool-0"]
    assert not made.knowledge.pools.members
    assert made.receive(AS_POOL, Heartbeat(NodeStats()), SILENCE) == []
    assert made.counters.dropped_messages["stale"] == 1


def test_a_pool_that_joins_again_replaces_itself() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    effects = made.join_pool(POOL, Incarnation("4" * 16), 1.0)
    assert [effect.node for effect in effects if isinstance(effect, Lost)] == [AS_POOL]
    assert set(made.knowledge.pools.members) == {"4" * 16}


def test_what_only_nodes_say_is_dropped() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    made.receive(AS_POOL, Tokens(()), 1.0)
    assert made.counters.dropped_messages["unexpected"] == 1


ELSEWHERE = Incarnation("4" * 16)
LONG = tuple(range(41))  # 10 blocks and a token


def with_two_pools(there: int) -> Brain:
    """`decode-0` and a pool on host-a, which has nothing; `decode-1` and a pool on host-b, which has `there` blocks."""
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    made.join_pool(replace(POOL, name=NodeName("pool-1"), host_id="host-b", endpoint="b:1"), ELSEWHERE, 0.0)
    root = root_hash(bytes.fromhex(POOL.model_digest), LAYOUT, b"")
    names = tuple(short_name(name) for name in chain(root, LONG, LAYOUT.block_size))
    made.receive(ELSEWHERE, CacheSnapshot(1, names[:there]), 1.0)
    return made


@pytest.mark.parametrize(("there", "tokens"), [(10, 40), (4, 16), (3, 0), (0, 0)])
def test_what_another_hosts_pool_has_is_told_of_if_it_is_enough(there: int, tokens: int) -> None:
    knowledge = with_two_pools(there).knowledge
    names = knowledge.names_of(Request(RequestId("r"), LONG, SamplingParams(1), 10.0))
    told = {node: (pool.address, count) for node, (pool, count) in knowledge.elsewhere(names, (HERE, THERE)).items()}
    address = PeerAddress(NodeName("pool-1"), ELSEWHERE, "host-b", "b:1")
    assert told == ({HERE: (address, tokens)} if tokens else {}), "and never to nodes of its own host"


def test_a_node_without_a_pool_is_told_of_none() -> None:
    made = with_two_pools(10)
    made.node_gone(AS_POOL, NodeGone("gone"), 2.0)
    knowledge = made.knowledge
    assert (
        knowledge.elsewhere(knowledge.names_of(Request(RequestId("r"), LONG, SamplingParams(1), 10.0)), (HERE,)) == {}
    )


def test_another_salt_is_another_prompt_there_too() -> None:
    knowledge = with_two_pools(10).knowledge
    salted = Request(RequestId("r"), LONG, SamplingParams(1), 10.0, cache_salt=b"another tenant's")
    assert knowledge.elsewhere(knowledge.names_of(salted), (HERE,)) == {}


def test_the_order_tells_where_and_what_computing_takes() -> None:
    made = with_two_pools(10)
    made.node_gone(THERE, NodeGone("gone"), 2.0)
    made.join(replace(node("prefill-0", "host-a"), role=Role.PREFILL), Incarnation("5" * 16), 2.0)
    effects = made.submit(Request(RequestId("r"), LONG, SamplingParams(4), 10.0), 3.0)
    orders = [effect.message for effect in effects if isinstance(effect, Send)]
    told = [order.elsewhere for order in orders if isinstance(order, Submit | Prefill)]
    assert len(told) == 2
    assert told[0] == told[1] is not None
    assert told[0].tokens == 40
    assert 0 < told[0].token_seconds < 1e-3


def test_it_is_told_on_the_wire() -> None:
    elsewhere = Elsewhere(PeerAddress(NodeName("pool-1"), ELSEWHERE, "host-b", "b:1"), 40, 0.0005)
    key = AttemptKey(RequestId("r"), 1, 0)
    job = Work(key, Request(RequestId("r"), LONG, SamplingParams(4), 10.0), ())
    submit, prefill = order_to_pb(Submit(job, None, 0.0, elsewhere)), order_to_pb(Prefill(job, True, elsewhere))
    for command in (command_from_pb(submit), command_from_pb(prefill)):
        assert isinstance(command, messages.Submit | messages.Prefill)
        assert command.elsewhere == elsewhere
    without = command_from_pb(order_to_pb(Prefill(job, True)))
    assert isinstance(without, messages.Prefill)
    assert without.elsewhere is None
