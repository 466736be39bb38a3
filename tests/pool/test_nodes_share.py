"""Nodes of one host on one pool: what one has computed is found by all, read in place, and in memory once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import Cancelled
from baton.pool_terms import Elsewhere
from baton.types import AttemptKey, Incarnation, RequestId, Work
from node_engine.core.ledger import BlockState
from node_engine.core.messages import (
    CacheQuery,
    Cancel,
    CoordinatorLost,
    GiveTicket,
    LedgerQuery,
    PeerGone,
    Prefill,
    Submit,
)
from tests.pool.nodes import BLOCK, Host, reference
from tests.unit.roles.bench import WRITER, work

PROMPT = tuple(range(100, 150))  # 50 tokens: three blocks and two tokens


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, prefill=2, decode=2, num_blocks=64)
    yield made
    made.close()


def test_a_prefix_is_computed_once_and_in_memory_once(host: Host) -> None:
    first = work(PROMPT, request="a")
    assert host.serve(first) == reference(first)
    ended = host.prefill[0].take("prefill_ended")[0]
    assert (ended.computed_tokens, ended.cached_tokens, ended.pooled_tokens) == (50, 0, 0)
    host.settle()
    assert len(host.pool.core.memory.index) == 3
    for node in (host.prefill[0], host.decode[0]):
        assert len(list(node.pool.full_blocks())) == 0, "private copies of what the pool has"
    second = work((*PROMPT[:48], 7, 8, 9), request="b")
    assert host.serve(second, prefill=1, decode=1) == reference(second)
    admitted = host.decode[1].take("admitted")[0]
    assert (admitted.cached_tokens, admitted.pooled_tokens, admitted.received_tokens) == (48, 48, 3)
    ended = host.prefill[1].take("prefill_ended")[0]
    assert (ended.computed_tokens, ended.cached_tokens, ended.pooled_tokens) == (3, 48, 48)
    host.settle()
    host.check()


def test_what_is_published_while_a_request_runs_is_swapped_under_it(host: Host) -> None:
    first = work(PROMPT, request="a", max_tokens=40)
    node = host.decode[0]
    seen: list[int] = []

    def between() -> None:
        host.settle()
        seen.append(node.held().get(BlockState.IN_USE, 0))

    assert host.serve(first, while_running=between) == reference(first)
    host.settle()
    assert min(seen[20:]) <= 2, "own blocks behind those that the pool has"
    assert len(host.pool.core.memory.index) == (50 + 39) // BLOCK
    host.check()


def test_who_waits_when_a_prefix_is_published_starts_with_it(tmp_path: Path) -> None:
    """Its own look-up came too early, and the copies in this node's cache are gone by the time it gets blocks."""
    host = Host(tmp_path, num_blocks=64, max_batched_tokens=32)
    node = host.prefill[0]
    jobs = [work((*PROMPT[:48], number), request=str(number), max_tokens=1) for number in range(10)]
    for job in jobs:
        node.tell(Prefill(job, alone=True))
    while node.step():
        host.settle()
    computed = [ended.computed_tokens for ended in node.take("prefill_ended")]
    assert len(computed) == 10
    assert sum(computed) < 49 * 9
    assert computed[-1] == 1
    host.check()
    host.close()


def test_an_answer_from_before_a_publication_is_asked_for_again(host: Host) -> None:
    node = host.prefill[0]
    node.tell(Prefill(work(PROMPT, request="a", max_tokens=1), alone=True))
    while node.step():
        pass
    assert node.port is not None
    node.port.slow = True
    second = work((*PROMPT[:48], 1), request="b", max_tokens=1)
    node.tell(Prefill(second, alone=True))  # asked when the pool has nothing
    host.pool.settle()
    node.receive()
    assert len(list(node.pool.full_blocks())) == 0
    for _ in range(2):
        node.port.lookups.popleft()()
    while node.step():
        pass
    assert node.take("prefill_ended")[-1].computed_tokens == 1
    host.settle()
    host.check()


def test_an_attempt_waits_for_its_look_up_until_it_is_cancelled_and_others_do_not(host: Host) -> None:
    node = host.prefill[0]
    assert node.port is not None
    node.port.slow = True
    slow, quick = work(PROMPT, request="a"), work(PROMPT, request="b")
    node.tell(Prefill(slow, alone=False))
    assert node.role.holding == 0
    node.tell(Cancel(slow.key, Cancelled("the client left")))
    assert slow.key in node.plane.aborted
    node.let_go()
    assert node.role.holding == 0
    node.port.slow = False
    node.tell(Prefill(quick, alone=False))
    assert node.role.holding == 1
    node.tell(CoordinatorLost())  # whoever waits is told first, and then dropped with the rest
    assert not node.inbox
    host.prefill[0].let_go()
    node.port.lookups.popleft()()  # too late: its pin goes back
    host.settle()
    host.check()


def test_what_concerns_no_attempt_ends_no_look_up(host: Host) -> None:
    """An operator's question and the end of some other node cost no prompt what the pool has of it."""
    node = host.decode[0]
    assert node.port is not None
    node.port.slow = True
    job = work(PROMPT, request="a")
    order, others = Submit(job, WRITER), (LedgerQuery(1), CacheQuery(), PeerGone(Incarnation("somebody else")))
    for command in (order, *others):
        node.lookups.take(command)
    assert tuple(node.inbox) == others
    node.lookups.take(PeerGone(WRITER.incarnation))
    assert tuple(node.inbox)[3:] == (order, PeerGone(WRITER.incarnation)), "its writer ends after it was named"
    node.inbox.clear()
    node.port.lookups.popleft()()  # too late: its pin goes back
    host.check()


@pytest.mark.parametrize("when", range(12))
def test_a_cancelled_reader_lets_go_of_the_pool(host: Host, when: int) -> None:
    host.serve(work(PROMPT, request="a"))
    host.settle()
    job = work((*PROMPT[:48], *range(300, 380)), request="b", max_tokens=20)
    sender, receiver = host.prefill[1], host.decode[1]
    receiver.tell(Submit(job, WRITER))
    sender.tell(Prefill(job, alone=False))
    assert host.pool.pinned > 0
    if when > 1:
        (ticket,) = receiver.plane.granted.values()
        sender.tell(GiveTicket(ticket))
    for _ in range(when):
        sender.step()
    for node in (sender, receiver):
        node.tell(Cancel(job.key, Cancelled("the client left")))
    sender.let_go()
    receiver.drop_revoked()
    host.settle()
    host.check()


def test_a_copy_that_a_sender_reads_outlives_its_publication(host: Host) -> None:
    sender, receiver = host.prefill[0], host.decode[0]
    job = work(PROMPT, request="a")
    receiver.tell(Submit(job, WRITER))
    sender.tell(Prefill(job, alone=False))
    (ticket,) = receiver.plane.granted.values()
    sender.tell(GiveTicket(ticket))
    while sender.step():
        pass
    host.settle()
    assert len(list(sender.pool.full_blocks())) == 0
    assert sender.held() == {BlockState.IN_USE: 4}, "the hand-off still sends from here"
    host.land(sender, receiver, job.key)
    while receiver.step():
        pass
    assert receiver.output(job.key) == reference(job)
    host.settle()
    host.check()


def test_a_refused_publication_leaves_the_copies(host: Host) -> None:
    node = host.prefill[0]
    job = work(PROMPT, request="a", max_tokens=1)
    node.tell(Prefill(job, alone=True))
    while node.step():
        pass
    assert node.port is not None
    node.port.refuse()
    node.receive()
    assert len(list(node.pool.full_blocks())) == 3
    host.check()
    again = work((*PROMPT, 1, 2), request="b", max_tokens=1)
    node.tell(Prefill(again, alone=True))
    while node.step():
        pass
    host.settle()
    assert len(host.pool.core.memory.index) == 3, "published after all"
    host.check()


def test_two_who_computed_the_same_keep_one(host: Host) -> None:
    for number in range(2):
        job = work(PROMPT, request=str(number), max_tokens=1)
        host.prefill[number].tell(Prefill(job, alone=True))
        while host.prefill[number].step():
            pass
    host.settle()
    assert len(host.pool.core.memory.index) == 3
    assert sum(port.copied for port in host.pool.ports) == 3
    assert all(len(list(node.pool.full_blocks())) == 0 for node in host.nodes)
    host.check()


def test_a_prompt_to_be_scored_is_not_looked_up(host: Host) -> None:
    host.serve(work(PROMPT, request="a"))
    host.settle()
    job = work(PROMPT, request="b", max_tokens=1, prompt_logprobs=0)
    host.prefill[1].tell(Prefill(job, alone=True))
    assert host.pool.pinned == 0
    while host.prefill[1].step():
        pass
    assert host.prefill[1].take("prefill_ended")[0].computed_tokens == 50
    host.settle()
    host.check()


def test_decode_publishes_what_it_writes_and_a_resumed_request_finds_it(host: Host) -> None:
    node = host.decode[0]
    job = work(PROMPT, request="a", max_tokens=60)
    node.tell(Submit(job, None))
    for _ in range(41):
        node.step()
        host.settle()
    shown = node.output(job.key)
    assert shown == reference(job)[: len(shown)]
    resumed = Work(AttemptKey(RequestId("a"), 1, 0), job.request, tuple(shown), model=job.model)
    other = host.decode[1]
    other.tell(Submit(resumed, None))
    while other.step():
        pass
    admitted = other.take("admitted")[0]
    assert admitted.computed_tokens <= BLOCK
    assert admitted.pooled_tokens == len(resumed.context) - admitted.computed_tokens
    node.tell(Cancel(job.key, Cancelled("it died")))
    host.settle()
    host.check()


def test_the_next_turn_computes_its_own_tokens_and_a_block_at_most(host: Host) -> None:
    tokens = PROMPT
    for turn in range(4):
        job = work(tokens, request=f"turn {turn}", max_tokens=21)
        answer = host.serve(job, prefill=turn % 2, decode=turn // 2)
        assert answer == reference(job)
        host.settle()
        if turn:
            ended = host.prefill[turn % 2].take("prefill_ended")[-1]
            assert ended.computed_tokens <= 10 + BLOCK
        tokens = (*tokens, *answer, *range(500, 510))
    host.check()


def test_a_sender_keeps_what_it_reads_in_the_pool(tmp_path: Path) -> None:
    """Its sequence has ended by then, and the pool would like to have the room."""
    host = Host(tmp_path, prefill=2, decode=1, num_blocks=64, pool_blocks=4)
    host.serve(work(PROMPT, request="a"))
    host.settle()
    sender, receiver = host.prefill[1], host.decode[0]
    assert receiver.port is not None
    receiver.port.attached = False
    job = work(PROMPT, request="b")
    receiver.tell(Submit(job, WRITER))
    sender.tell(Prefill(job, alone=False))
    while sender.step():
        pass
    assert sender.scheduler.get(job.key) is None
    other = work(range(300, 360), request="c", max_tokens=1)
    host.prefill[0].tell(Prefill(other, alone=True))
    while host.prefill[0].step():
        pass
    host.settle()
    assert sorted(host.pool.core.memory.index.depth(block) for block in range(3)) == [0, 1, 2]
    host.land(sender, receiver, job.key)
    while receiver.step():
        pass
    assert receiver.output(job.key) == reference(job)
    host.settle()
    host.check()
    host.close()


def test_what_another_hosts_pool_sent_is_told_apart(host: Host) -> None:
    first = work(PROMPT, request="a")
    assert host.serve(first) == reference(first)
    host.settle()
    elsewhere = Elsewhere(WRITER, 48, 0.001)
    sender, receiver = host.prefill[1], host.decode[1]
    assert sender.port is not None
    assert receiver.port is not None
    sender.port.remote = receiver.port.remote = 2
    second = work((*PROMPT[:48], 7, 8, 9), request="b")
    receiver.tell(Submit(second, None, elsewhere=elsewhere))
    while receiver.step():
        pass
    admitted = receiver.take("admitted")[0]
    assert (admitted.cached_tokens, admitted.pooled_tokens, admitted.remote_tokens) == (48, 48, 32)
    sender.tell(Prefill(work((*PROMPT[:48], 3), request="c"), alone=True, elsewhere=elsewhere))
    while sender.step():
        pass
    ended = sender.take("prefill_ended")[0]
    assert (ended.cached_tokens, ended.pooled_tokens, ended.remote_tokens) == (48, 48, 32)
    assert sender.port.told == receiver.port.told == [elsewhere]
    host.settle()
    host.check()
