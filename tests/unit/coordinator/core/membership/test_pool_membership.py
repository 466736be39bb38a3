"""Pools as members: told apart from nodes, heard, given up, and counted for the nodes of their
host."""

from dataclasses import replace

import pytest

from baton.cluster_link.messages import (
    PROTOCOL_VERSION,
    CacheEvents,
    CacheSnapshot,
    CacheSnapshotRequest,
    DecodeOrder,
    Heartbeat,
    JoinInfo,
    PoolJoinInfo,
    PrefillOrder,
    StepTokens,
)
from baton.cluster_link.order_codec import decode_order, encode_order
from baton.cluster_link.report_types import NodeStats
from baton.errors import ConfigError, NodeLost
from baton.kv.blocks import KVLayout, iter_block_hashes, root_hash, short_hash
from baton.kv.pool_types import RemotePrefix
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    NodeName,
    PeerAddress,
    Request,
    RequestId,
    Role,
    SamplingParams,
)
from coordinator.core.brain import Brain
from coordinator.core.common.effects import MemberLost, SendOrder
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import POLICIES

LAYOUT = KVLayout(2, 2, 16, 4, "float32")
SILENCE = 5.0
POOL = PoolJoinInfo(
    PROTOCOL_VERSION, NodeName("pool-0"), "host-a", "127.0.0.1:1", 7, "ab" * 32, LAYOUT, 100, "p"
)
HERE, THERE = Incarnation("1" * 16), Incarnation("2" * 16)
AS_POOL = Incarnation("3" * 16)


def brain() -> Brain:
    made = Brain(
        NodeRegistry(SILENCE, 15.0),
        POLICIES["prefix_aware"](),
        BrainSettings(
            mode="disaggregated",
            max_queue=10,
            max_attempts=8,
            reserve_timeout=15.0,
            explain_keep=10,
        ),
    )
    for incarnation, name, host in ((HERE, "decode-0", "host-a"), (THERE, "decode-1", "host-b")):
        made.join_node(node(name, host), incarnation, 0.0)
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


def test_pool_gets_no_work_and_sets_no_bounds() -> None:
    made = brain()
    before = made.get_model_bounds()
    made.join_pool(replace(POOL, num_blocks=1), AS_POOL, 0.0)
    assert made.get_model_bounds() == before
    assert AS_POOL not in made.node_registry.nodes
    assert {member.info.name for member in made.list_members()} == {
        "decode-0",
        "decode-1",
        "pool-0",
    }


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
def test_mismatching_pool_is_refused_by_field(field: str, value: object) -> None:
    made = brain()
    with pytest.raises(ConfigError, match=field):
        made.join_pool(replace(POOL, **{field: value}), AS_POOL, 0.0)  # type: ignore[arg-type]
    assert made.counters.joins["refused"] == 1


def test_pool_blocks_count_for_nodes_of_its_host() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    prompt = tuple(range(12))
    request = Request(RequestId("r"), prompt, SamplingParams(1), 10.0)
    root = root_hash(bytes.fromhex(POOL.model_digest), LAYOUT, b"")
    names = tuple(short_hash(name) for name in iter_block_hashes(root, prompt, LAYOUT.block_size))
    made.receive_report(AS_POOL, CacheSnapshot(1, names[:2]), 1.0)
    lookup = made.placement_state.cached_prefixes
    assert lookup.cached_tokens_by_node(lookup.hash_prompt(request)) == {HERE: 8}
    made.receive_report(HERE, CacheSnapshot(1, names), 1.0)
    assert lookup.cached_tokens_by_node(lookup.hash_prompt(request)) == {HERE: 12}, (
        "the better of the two"
    )
    made.receive_report(HERE, CacheEvents(2, (), names), 1.0)
    made.receive_report(AS_POOL, CacheEvents(2, (), names[1:2]), 1.0)
    assert lookup.cached_tokens_by_node(lookup.hash_prompt(request)) == {HERE: 4}
    made.remove_member(AS_POOL, NodeLost("gone"), 2.0)
    assert lookup.cached_tokens_by_node(lookup.hash_prompt(request)) == {}


def test_gap_in_pool_events_requests_snapshot() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    made.receive_report(AS_POOL, CacheSnapshot(1, ()), 1.0)
    assert SendOrder(AS_POOL, CacheSnapshotRequest()) in made.receive_report(
        AS_POOL, CacheEvents(3, (5,), ()), 1.0
    )


def test_silent_pool_is_removed() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    for one in (HERE, THERE):
        made.receive_report(one, Heartbeat(NodeStats()), SILENCE - 1)
    due = made.next_tick_at()
    assert due is not None
    assert due <= SILENCE
    lost = [effect for effect in made.tick(SILENCE) if isinstance(effect, MemberLost)]
    assert [effect.name for effect in lost] == ["pool-0"]
    assert not made.placement_state.pools.members
    assert made.receive_report(AS_POOL, Heartbeat(NodeStats()), SILENCE) == []
    assert made.counters.dropped_messages["stale"] == 1


def test_rejoining_pool_replaces_itself() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    effects = made.join_pool(POOL, Incarnation("4" * 16), 1.0)
    assert [effect.incarnation for effect in effects if isinstance(effect, MemberLost)] == [AS_POOL]
    assert set(made.placement_state.pools.members) == {"4" * 16}


def test_node_only_reports_from_pool_are_dropped() -> None:
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    made.receive_report(AS_POOL, StepTokens(()), 1.0)
    assert made.counters.dropped_messages["unexpected"] == 1


ELSEWHERE = Incarnation("4" * 16)
LONG = tuple(range(41))  # 10 blocks and a token


def with_two_pools(there: int) -> Brain:
    """`decode-0` and a pool on host-a, which has nothing; `decode-1` and a pool on host-b, which
    has `there` blocks."""
    made = brain()
    made.join_pool(POOL, AS_POOL, 0.0)
    made.join_pool(
        replace(POOL, name=NodeName("pool-1"), host_id="host-b", endpoint="b:1"), ELSEWHERE, 0.0
    )
    root = root_hash(bytes.fromhex(POOL.model_digest), LAYOUT, b"")
    names = tuple(short_hash(name) for name in iter_block_hashes(root, LONG, LAYOUT.block_size))
    made.receive_report(ELSEWHERE, CacheSnapshot(1, names[:there]), 1.0)
    return made


@pytest.mark.parametrize(("there", "tokens"), [(10, 40), (4, 16), (3, 0), (0, 0)])
def test_remote_pool_prefix_is_offered_when_longer(there: int, tokens: int) -> None:
    lookup = with_two_pools(there).placement_state.cached_prefixes
    names = lookup.hash_prompt(Request(RequestId("r"), LONG, SamplingParams(1), 10.0))
    told = {
        node: (pool.address, count)
        for node, (pool, count) in lookup.find_remote_prefixes(names, (HERE, THERE)).items()
    }
    address = PeerAddress(NodeName("pool-1"), ELSEWHERE, "host-b", "b:1")
    assert told == ({HERE: (address, tokens)} if tokens else {}), (
        "and never to nodes of its own host"
    )


def test_node_without_pool_gets_no_remote_prefix() -> None:
    made = with_two_pools(10)
    made.remove_member(AS_POOL, NodeLost("gone"), 2.0)
    lookup = made.placement_state.cached_prefixes
    assert (
        lookup.find_remote_prefixes(
            lookup.hash_prompt(Request(RequestId("r"), LONG, SamplingParams(1), 10.0)), (HERE,)
        )
        == {}
    )


def test_cache_salt_separates_remote_prefixes() -> None:
    lookup = with_two_pools(10).placement_state.cached_prefixes
    salted = Request(RequestId("r"), LONG, SamplingParams(1), 10.0, cache_salt=b"another tenant's")
    assert lookup.find_remote_prefixes(lookup.hash_prompt(salted), (HERE,)) == {}


def test_order_names_remote_pool_and_compute_cost() -> None:
    made = with_two_pools(10)
    made.remove_member(THERE, NodeLost("gone"), 2.0)
    made.join_node(
        replace(node("prefill-0", "host-a"), role=Role.PREFILL), Incarnation("5" * 16), 2.0
    )
    effects = made.submit_request(Request(RequestId("r"), LONG, SamplingParams(4), 10.0), 3.0)
    orders = [effect.order for effect in effects if isinstance(effect, SendOrder)]
    told = [
        order.remote_prefix for order in orders if isinstance(order, DecodeOrder | PrefillOrder)
    ]
    first, second = told
    assert first is not None
    assert first == second
    assert first.prefix_tokens == 40
    assert 0 < first.compute_seconds_per_token < 1e-3


def test_remote_prefix_is_encoded_in_order() -> None:
    elsewhere = RemotePrefix(
        PeerAddress(NodeName("pool-1"), ELSEWHERE, "host-b", "b:1"), 40, 0.0005
    )
    key = AttemptKey(RequestId("r"), 1, 0)
    job = AttemptSpec(key, Request(RequestId("r"), LONG, SamplingParams(4), 10.0), ())
    submit, prefill = (
        encode_order(DecodeOrder(job, None, 0.0, elsewhere)),
        encode_order(PrefillOrder(job, True, elsewhere)),
    )
    for command in (decode_order(submit), decode_order(prefill)):
        assert isinstance(command, DecodeOrder | PrefillOrder)
        assert command.remote_prefix == elsewhere
    without = decode_order(encode_order(PrefillOrder(job, True)))
    assert isinstance(without, PrefillOrder)
    assert without.remote_prefix is None
