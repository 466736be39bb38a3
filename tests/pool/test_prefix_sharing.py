"""Nodes of one host share a pool: what one computes is found by all, read in place, and in
memory once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster_link.messages import (
    CacheSnapshotRequest,
    CancelOrder,
    DecodeOrder,
    LedgerQuery,
    PeerLostNotice,
    PrefillOrder,
    TicketOrder,
)
from baton.errors import Cancelled
from baton.kv.blocks import BlockHash
from baton.kv.pool_types import RemotePrefix
from baton.types import AttemptKey, AttemptSpec, Incarnation, RequestId
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.node_commands import CoordinatorLost
from tests.pool.in_process_nodes import BLOCK_TOKENS, InProcessHost, reference_tokens
from tests.unit.node_roles.role_bench import WRITER, make_work

PROMPT = tuple(range(100, 150))  # 50 tokens: three blocks and two tokens


@pytest.fixture
def host(tmp_path: Path) -> Iterator[InProcessHost]:
    host = InProcessHost(tmp_path, prefill=2, decode=2, num_blocks=64)
    yield host
    host.close()


def list_full_blocks(pool: BlockPool) -> list[BlockHash]:
    return list(pool.prefix_index.iter_full_block_hashes(pool.block_size))


def test_a_prefix_is_computed_once_and_in_memory_once(host: InProcessHost) -> None:
    first = make_work(PROMPT, request="a")
    assert host.serve_request(first) == reference_tokens(first)
    ended = host.prefill[0].pop_messages("prefill_ended")[0]
    assert (ended.computed_tokens, ended.cached_tokens, ended.pooled_tokens) == (50, 0, 0)
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 3
    for node in (host.prefill[0], host.decode[0]):
        assert len(list_full_blocks(node.pool)) == 0, "private copies of what the pool has"
    second = make_work((*PROMPT[:48], 7, 8, 9), request="b")
    assert host.serve_request(second, prefill=1, decode=1) == reference_tokens(second)
    admitted = host.decode[1].pop_messages("admitted")[0]
    assert (admitted.cached_tokens, admitted.pooled_tokens, admitted.received_tokens) == (48, 48, 3)
    ended = host.prefill[1].pop_messages("prefill_ended")[0]
    assert (ended.computed_tokens, ended.cached_tokens, ended.pooled_tokens) == (3, 48, 48)
    host.run_publications()
    host.check()


def test_running_request_switches_to_the_published_blocks(host: InProcessHost) -> None:
    first = make_work(PROMPT, request="a", max_tokens=40)
    node = host.decode[0]
    seen: list[int] = []

    def between() -> None:
        host.run_publications()
        seen.append(node.count_held_blocks().get(BlockState.IN_USE, 0))

    assert host.serve_request(first, while_running=between) == reference_tokens(first)
    host.run_publications()
    assert min(seen[20:]) <= 2, "own blocks behind those that the pool has"
    assert len(host.pool.block_pool.memory.index) == (50 + 39) // BLOCK_TOKENS
    host.check()


def test_waiting_request_starts_with_a_prefix_published_meanwhile(tmp_path: Path) -> None:
    """Its look-up came too early, and this node's copies are evicted by the time it gets blocks."""
    host = InProcessHost(tmp_path, num_blocks=64, max_batched_tokens=32)
    node = host.prefill[0]
    jobs = [
        make_work((*PROMPT[:48], number), request=str(number), max_tokens=1) for number in range(10)
    ]
    for job in jobs:
        node.send_item(PrefillOrder(job, needs_no_decode=True))
    while node.step():
        host.run_publications()
    computed = [ended.computed_tokens for ended in node.pop_messages("prefill_ended")]
    assert len(computed) == 10
    assert sum(computed) < 49 * 9
    assert computed[-1] == 1
    host.check()
    host.close()


def test_lookup_older_than_a_publication_is_repeated(host: InProcessHost) -> None:
    node = host.prefill[0]
    node.send_item(PrefillOrder(make_work(PROMPT, request="a", max_tokens=1), needs_no_decode=True))
    while node.step():
        pass
    assert node.pool_client is not None
    node.pool_client.is_slow = True
    second = make_work((*PROMPT[:48], 1), request="b", max_tokens=1)
    node.send_item(PrefillOrder(second, needs_no_decode=True))  # asked when the pool has nothing
    host.pool.run_publications()
    node.drain_inbox()
    assert len(list_full_blocks(node.pool)) == 0
    for _ in range(2):
        node.pool_client.lookups.popleft()()
    while node.step():
        pass
    assert node.pop_messages("prefill_ended")[-1].computed_tokens == 1
    host.run_publications()
    host.check()


def test_repeated_lookup_keeps_the_count_of_remote_blocks(host: InProcessHost) -> None:
    """The first look-up fetched blocks from another host's pool; the second finds them here."""
    node = host.prefill[0]
    assert node.pool_client is not None
    other = make_work((*PROMPT[:48], 5), request="a", max_tokens=1)
    node.send_item(PrefillOrder(other, needs_no_decode=True))
    while node.step():
        pass
    node.pool_client.is_slow = True
    second = make_work((*PROMPT[:48], 1), request="b", max_tokens=1)
    node.send_item(PrefillOrder(second, needs_no_decode=True))
    host.pool.run_publications()
    for remote_blocks in (2, 0):
        node.pool_client.remote_blocks = remote_blocks
        node.pool_client.lookups.popleft()()
    assert not node.pool_client.lookups
    while node.step():
        pass
    ended = node.pop_messages("prefill_ended")[-1]
    assert (ended.cached_tokens, ended.pooled_tokens, ended.remote_tokens) == (48, 48, 32)
    host.run_publications()
    host.check()


def test_slow_lookup_delays_only_its_own_attempt(host: InProcessHost) -> None:
    node = host.prefill[0]
    assert node.pool_client is not None
    node.pool_client.is_slow = True
    slow, quick = make_work(PROMPT, request="a"), make_work(PROMPT, request="b")
    node.send_item(PrefillOrder(slow, needs_no_decode=False))
    assert node.role.num_held_attempts == 0
    node.send_item(CancelOrder(slow.key, Cancelled("the client left")))
    assert slow.key in node.plane.aborted
    node.drop_aborted()
    assert node.role.num_held_attempts == 0
    node.pool_client.is_slow = False
    node.send_item(PrefillOrder(quick, needs_no_decode=False))
    assert node.role.num_held_attempts == 1
    node.send_item(CoordinatorLost())  # whoever waits is told first, and then dropped with the rest
    assert not node.inbox
    host.prefill[0].drop_aborted()
    node.pool_client.lookups.popleft()()  # too late: its pin goes back
    host.run_publications()
    host.check()


def test_unrelated_commands_do_not_end_a_lookup(host: InProcessHost) -> None:
    """A query by an operator and the end of another node do not interrupt a look-up."""
    node = host.decode[0]
    assert node.pool_client is not None
    node.pool_client.is_slow = True
    job = make_work(PROMPT, request="a")
    order, others = (
        DecodeOrder(job, WRITER),
        (LedgerQuery(1), CacheSnapshotRequest(), PeerLostNotice(Incarnation("somebody else"))),
    )
    for command in (order, *others):
        node.submit_command(command)
    assert tuple(node.inbox) == others
    node.submit_command(PeerLostNotice(WRITER.incarnation))
    assert tuple(node.inbox)[3:] == (order, PeerLostNotice(WRITER.incarnation)), (
        "its writer ends after it was named"
    )
    node.inbox.clear()
    node.pool_client.lookups.popleft()()  # too late: its pin goes back
    host.check()


@pytest.mark.parametrize("when", range(12))
def test_cancelled_reader_releases_its_pins(host: InProcessHost, when: int) -> None:
    host.serve_request(make_work(PROMPT, request="a"))
    host.run_publications()
    job = make_work((*PROMPT[:48], *range(300, 380)), request="b", max_tokens=20)
    sender, receiver = host.prefill[1], host.decode[1]
    receiver.send_item(DecodeOrder(job, WRITER))
    sender.send_item(PrefillOrder(job, needs_no_decode=False))
    assert host.pool.num_pins > 0
    if when > 1:
        (ticket,) = receiver.plane.granted.values()
        sender.send_item(TicketOrder(ticket))
    for _ in range(when):
        sender.step()
    for node in (sender, receiver):
        node.send_item(CancelOrder(job.key, Cancelled("the client left")))
    sender.drop_aborted()
    receiver.drop_revoked()
    host.run_publications()
    host.check()


def test_private_blocks_being_sent_outlive_their_publication(host: InProcessHost) -> None:
    sender, receiver = host.prefill[0], host.decode[0]
    job = make_work(PROMPT, request="a")
    receiver.send_item(DecodeOrder(job, WRITER))
    sender.send_item(PrefillOrder(job, needs_no_decode=False))
    (ticket,) = receiver.plane.granted.values()
    sender.send_item(TicketOrder(ticket))
    while sender.step():
        pass
    host.run_publications()
    assert len(list_full_blocks(sender.pool)) == 0
    assert sender.count_held_blocks() == {BlockState.IN_USE: 4}, (
        "the hand-off still sends from here"
    )
    host.land_handoff(sender, receiver, job.key)
    while receiver.step():
        pass
    assert receiver.collect_tokens(job.key) == reference_tokens(job)
    host.run_publications()
    host.check()


def test_dropped_publication_keeps_the_private_blocks(host: InProcessHost) -> None:
    node = host.prefill[0]
    job = make_work(PROMPT, request="a", max_tokens=1)
    node.send_item(PrefillOrder(job, needs_no_decode=True))
    while node.step():
        pass
    assert node.pool_client is not None
    node.pool_client.drop_publication()
    node.drain_inbox()
    assert len(list_full_blocks(node.pool)) == 3
    host.check()
    again = make_work((*PROMPT, 1, 2), request="b", max_tokens=1)
    node.send_item(PrefillOrder(again, needs_no_decode=True))
    while node.step():
        pass
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 3, "published after all"
    host.check()


def test_identical_blocks_of_two_nodes_are_deduplicated(host: InProcessHost) -> None:
    for number in range(2):
        job = make_work(PROMPT, request=str(number), max_tokens=1)
        host.prefill[number].send_item(PrefillOrder(job, needs_no_decode=True))
        while host.prefill[number].step():
            pass
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 3
    assert sum(port.copied_blocks for port in host.pool.clients) == 3
    assert all(len(list_full_blocks(node.pool)) == 0 for node in host.nodes)
    host.check()


def test_scoring_prompt_is_not_looked_up(host: InProcessHost) -> None:
    host.serve_request(make_work(PROMPT, request="a"))
    host.run_publications()
    job = make_work(PROMPT, request="b", max_tokens=1, prompt_logprobs=0)
    host.prefill[1].send_item(PrefillOrder(job, needs_no_decode=True))
    assert host.pool.num_pins == 0
    while host.prefill[1].step():
        pass
    assert host.prefill[1].pop_messages("prefill_ended")[0].computed_tokens == 50
    host.run_publications()
    host.check()


def test_resumed_request_finds_blocks_published_by_decode(host: InProcessHost) -> None:
    node = host.decode[0]
    job = make_work(PROMPT, request="a", max_tokens=60)
    node.send_item(DecodeOrder(job, None))
    for _ in range(41):
        node.step()
        host.run_publications()
    shown = node.collect_tokens(job.key)
    assert shown == reference_tokens(job)[: len(shown)]
    resumed = AttemptSpec(
        AttemptKey(RequestId("a"), 1, 0),
        job.request,
        tuple(shown),
        identity_digest=job.identity_digest,
    )
    other = host.decode[1]
    other.send_item(DecodeOrder(resumed, None))
    while other.step():
        pass
    admitted = other.pop_messages("admitted")[0]
    assert admitted.computed_tokens <= BLOCK_TOKENS
    assert admitted.pooled_tokens == len(resumed.context_token_ids) - admitted.computed_tokens
    node.send_item(CancelOrder(job.key, Cancelled("it died")))
    host.run_publications()
    host.check()


def test_next_turn_computes_only_new_tokens_and_at_most_one_block(host: InProcessHost) -> None:
    tokens = PROMPT
    for turn in range(4):
        job = make_work(tokens, request=f"turn {turn}", max_tokens=21)
        answer = host.serve_request(job, prefill=turn % 2, decode=turn // 2)
        assert answer == reference_tokens(job)
        host.run_publications()
        if turn:
            ended = host.prefill[turn % 2].pop_messages("prefill_ended")[-1]
            assert ended.computed_tokens <= 10 + BLOCK_TOKENS
        tokens = (*tokens, *answer, *range(500, 510))
    host.check()


def test_sender_keeps_its_pool_pins_until_sent(tmp_path: Path) -> None:
    """Its sequence has ended by then, and the pool needs the room."""
    host = InProcessHost(tmp_path, prefill=2, decode=1, num_blocks=64, pool_blocks=4)
    host.serve_request(make_work(PROMPT, request="a"))
    host.run_publications()
    sender, receiver = host.prefill[1], host.decode[0]
    assert receiver.pool_client is not None
    receiver.pool_client.is_attached = False
    job = make_work(PROMPT, request="b")
    receiver.send_item(DecodeOrder(job, WRITER))
    sender.send_item(PrefillOrder(job, needs_no_decode=False))
    while sender.step():
        pass
    assert sender.scheduler.sequences.get(job.key) is None
    other = make_work(range(300, 360), request="c", max_tokens=1)
    host.prefill[0].send_item(PrefillOrder(other, needs_no_decode=True))
    while host.prefill[0].step():
        pass
    host.run_publications()
    assert sorted(host.pool.block_pool.memory.index.paths.depth(block) for block in range(3)) == [
        0,
        1,
        2,
    ]
    host.land_handoff(sender, receiver, job.key)
    while receiver.step():
        pass
    assert receiver.collect_tokens(job.key) == reference_tokens(job)
    host.run_publications()
    host.check()
    host.close()


def test_tokens_promoted_from_another_host_are_counted_as_remote(host: InProcessHost) -> None:
    first = make_work(PROMPT, request="a")
    assert host.serve_request(first) == reference_tokens(first)
    host.run_publications()
    elsewhere = RemotePrefix(WRITER, 48, 0.001)
    sender, receiver = host.prefill[1], host.decode[1]
    assert sender.pool_client is not None
    assert receiver.pool_client is not None
    sender.pool_client.remote_blocks = receiver.pool_client.remote_blocks = 2
    second = make_work((*PROMPT[:48], 7, 8, 9), request="b")
    receiver.send_item(DecodeOrder(second, None, remote_prefix=elsewhere))
    while receiver.step():
        pass
    admitted = receiver.pop_messages("admitted")[0]
    assert (admitted.cached_tokens, admitted.pooled_tokens, admitted.remote_tokens) == (48, 48, 32)
    sender.send_item(
        PrefillOrder(
            make_work((*PROMPT[:48], 3), request="c"), needs_no_decode=True, remote_prefix=elsewhere
        )
    )
    while sender.step():
        pass
    ended = sender.pop_messages("prefill_ended")[0]
    assert (ended.cached_tokens, ended.pooled_tokens, ended.remote_tokens) == (48, 48, 32)
    assert sender.pool_client.remote_prefixes == receiver.pool_client.remote_prefixes == [elsewhere]
    host.run_publications()
    host.check()
