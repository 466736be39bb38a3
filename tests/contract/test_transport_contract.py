"""The contract that every transport keeps: real sockets, real segments, real threads."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Cancelled, HandoffFailed, Incomplete, LeaseExpired, PeerGone, Stale
from baton.kv_layout import KVLayout
from kv_transfer.plane import Aborted, Committed, LayerLanded, Lost, Sealed, SealInfo, Started
from tests.contract.rig import BACKENDS, LAYOUT, QUICK, SEAL, Rig, eventually, rig

LAYERS = LAYOUT.num_layers
ONE_LAYER = replace(QUICK, layers_per_message=1)


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with rig(request.param, tmp_path) as made:
        yield made
        assert made.decode_events.rest() == []
        assert made.prefill_events.rest() == []


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_hand_off_lands_whole_and_commits(pair: Rig) -> None:
    source, target = [4, 9, 2], [7, 0, 31]
    key, ticket = pair.hand_off(source, target)
    sealed = pair.decode_events.expect(Sealed)
    assert sealed.seal == SEAL
    assert pair.arrived(source, target)
    pair.inbound.commit(ticket.id)
    committed = pair.prefill_events.expect(Committed)
    assert committed.key == key
    assert committed.report.transport == pair.backend
    assert committed.report.bytes_sent == sealed.bytes_landed == 3 * pair.layout.block_bytes
    assert committed.report.slabs_sent == 3 * LAYERS
    assert pair.untouched([block for block in range(32) if block not in target])


def test_each_layer_lands_before_the_next_is_computed(backend: str, tmp_path: Path) -> None:
    """The next layer is announced only when this one has landed: a transfer of the whole would hang."""
    with rig(backend, tmp_path, settings=ONE_LAYER) as pair:
        source, target = [1, 2, 3, 4], [5, 6, 7, 8]
        key = pair.opened(4)
        ticket = pair.granted(key, target)
        pair.outbound.ticket(key, ticket)
        for layer in range(LAYERS):
            pair.announce(key, source, layers=[layer])
            assert pair.outbound.wait_landed(key, layer, timeout=30)
            assert pair.prefill_events.expect(LayerLanded) == LayerLanded(key, layer, 0, 4)
            if layer == 0:
                assert pair.decode_events.expect(Started) == Started(ticket.id)
        pair.outbound.seal(key, SealInfo((1,)))
        report = pair.finish(ticket).report
        assert report.slabs_landed_before_last_layer == 4 * (LAYERS - 1)
        assert pair.arrived(source, target)


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("chunks", [[4], [1, 3], [2, 1, 1]], ids=str)
def test_only_what_decode_lacks_is_written(pair: Rig, held: int, chunks: list[int]) -> None:
    """Partial prefixes at every cut, against chunks that end elsewhere."""
    source, lacking = [3, 1, 4, 15], [20, 21, 22, 23][held:]
    key = pair.opened(4)
    ticket = pair.granted(key, lacking, first_block=held)
    first = 0
    for number, size in enumerate(chunks):
        if number == len(chunks) - 1:
            pair.outbound.ticket(key, ticket)
        pair.announce(key, source[first : first + size], first)
        first += size
    pair.outbound.seal(key, SealInfo((1,)))
    assert pair.finish(ticket).report.bytes_sent == len(lacking) * LAYOUT.block_bytes
    assert pair.arrived(source[held:], lacking)
    assert pair.untouched([20, 21, 22, 23][:held])


def test_a_ticket_for_nothing_commits_at_once(pair: Rig) -> None:
    key = pair.opened(2)
    ticket = pair.granted(key, [], first_block=2)
    pair.announce(key, [1, 2])
    pair.outbound.seal(key, SealInfo((1,)))
    pair.outbound.ticket(key, ticket)
    assert pair.finish(ticket).report.bytes_sent == 0


def test_work_done_before_the_ticket_flows_when_it_comes(pair: Rig) -> None:
    key = pair.opened(3)
    pair.announce(key, [6, 7, 8])
    pair.outbound.seal(key, SealInfo((1,)))
    assert not pair.outbound.wait_landed(key, 0, timeout=0.01)
    ticket = pair.granted(key, [1, 2, 3])
    pair.outbound.ticket(key, ticket)
    pair.finish(ticket)
    assert pair.arrived([6, 7, 8], [1, 2, 3])


@pytest.mark.parametrize("layers_per_message", [0, 1, 2])
@pytest.mark.parametrize("slabs_per_message", [1, 3, 1000])
def test_messages_of_any_size_carry_the_same(
    backend: str, layers_per_message: int, slabs_per_message: int, tmp_path: Path
) -> None:
    payload = slabs_per_message * LAYOUT.slab_bytes
    settings = replace(QUICK, layers_per_message=layers_per_message, max_payload_bytes=payload)
    settings = replace(settings, credit_bytes=2 * payload)
    with rig(backend, tmp_path, settings=settings) as pair:
        source, target = [8, 6, 7, 5, 3], [0, 9, 2, 4, 1]
        _, ticket = pair.hand_off(source, target)
        pair.finish(ticket)
        assert pair.arrived(source, target)


def test_two_hand_offs_at_once_do_not_mix(pair: Rig) -> None:
    first, second = pair.opened(4), pair.opened(4)
    blocks = {first: ([0, 1, 2, 3], [10, 11, 12, 13]), second: ([4, 5, 6, 7], [14, 15, 16, 17])}
    tickets = {key: pair.granted(key, target) for key, (_, target) in blocks.items()}
    for layer in range(LAYERS):
        for key, (source, _) in blocks.items():
            pair.announce(key, source, layers=[layer])
            if layer == 1:
                pair.outbound.ticket(key, tickets[key])
    for key in blocks:
        pair.outbound.seal(key, SealInfo((1,)))
    for _ in blocks:
        pair.inbound.commit(pair.decode_events.expect(Sealed).ticket)
    assert {pair.prefill_events.expect(Committed).key for _ in blocks} == set(blocks)
    for source, target in blocks.values():
        assert pair.arrived(source, target)


def test_one_of_two_hand_offs_is_cancelled_and_the_other_is_whole(pair: Rig) -> None:
    doomed, fine = pair.opened(2), pair.opened(2)
    lost, kept = pair.granted(doomed, [10, 11]), pair.granted(fine, [12, 13])
    for key, ticket in ((doomed, lost), (fine, kept)):
        pair.outbound.ticket(key, ticket)
        pair.announce(key, [1, 2], layers=[0])
    pair.outbound.abort(doomed, Cancelled("the client left"))
    pair.aborted(doomed, Cancelled)
    pair.lost(lost, Cancelled)
    pair.announce(fine, [1, 2], layers=[1, 2])
    pair.outbound.seal(fine, SealInfo((1,)))
    pair.finish(kept)
    assert pair.arrived([1, 2], [12, 13])


def test_a_thousand_hand_offs(backend: str, tmp_path: Path) -> None:
    """Always a few at a time, over the same few blocks, each checked; and nothing is left of them."""
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=2, dtype="float32")
    with rig(backend, tmp_path, layout=layout) as pair:
        free, running, ended = list(range(0, 32, 2)), {}, 0
        for number in range(1000):
            at, source = free.pop(), [(7 * number) % 31, (11 * number + 5) % 31]
            _, ticket = pair.hand_off(source, [at, at + 1])
            running[ticket.id] = (source, at)
            if len(running) < 8 and number < 999:
                continue
            while running and (len(running) >= 8 or number == 999):
                done = pair.decode_events.expect(Sealed).ticket
                source, at = running.pop(done)
                assert pair.arrived(source, [at, at + 1])
                pair.inbound.commit(done)
                pair.prefill_events.expect(Committed)
                free.append(at)
                ended += 1
        assert ended == 1000
        counters = pair.inbound.counters()
        assert counters["slabs_landed"] == 1000 * 4
        counters.pop("ignored_late", None)  # a writer may renew what has just been committed
        assert not [name for name in counters if name.startswith(("ignored", "refused", "bad", "lost"))]


# leases and silence


def test_a_ticket_is_kept_alive_while_its_work_is_queued(tmp_path: Path) -> None:
    """For longer than its lease nothing is ready to be written: the heartbeat alone keeps the ticket."""
    settings = replace(QUICK, ticket_ttl=2.0, renew_interval=0.1)
    with rig("zmq", tmp_path, settings=settings) as pair:
        key = pair.opened(1)
        ticket = pair.granted(key, [3])
        pair.outbound.ticket(key, ticket)
        with pytest.raises(queue.Empty):
            pair.decode_events.get(timeout=2.5)
        pair.announce(key, [1])
        pair.outbound.seal(key, SealInfo((1,)))
        pair.finish(ticket)


def test_a_ticket_that_nobody_renews_is_lost(backend: str, tmp_path: Path) -> None:
    silent = replace(QUICK, renew_interval=100.0)
    with rig(backend, tmp_path, outbound_settings=silent) as pair:
        pair.works()  # there is a link
        key = pair.opened(2)
        ticket = pair.granted(key, [3, 4], ttl=1.0)
        pair.outbound.ticket(key, ticket)
        pair.announce(key, [1, 2], layers=[0])
        pair.lost(ticket, LeaseExpired)
        pair.aborted(key, LeaseExpired)
        pair.works()


def test_a_ticket_whose_writer_never_comes_is_lost(pair: Rig) -> None:
    ticket = pair.granted(pair.key(), [3], ttl=0.1)
    pair.lost(ticket, LeaseExpired)


def test_a_hand_off_that_stands_still_is_lost_though_renewed(backend: str, tmp_path: Path) -> None:
    settings = replace(QUICK, renew_interval=0.05, progress_timeout=0.3)
    with rig(backend, tmp_path, settings=settings, outbound_settings=QUICK) as pair:
        key = pair.opened(2)
        ticket = pair.granted(key, [3, 4])
        pair.outbound.ticket(key, ticket)
        pair.announce(key, [1, 2], layers=[0])
        pair.lost(ticket, HandoffFailed)
        pair.aborted(key, HandoffFailed)


def test_a_late_writer_of_a_lost_ticket_is_told_so(pair: Rig) -> None:
    key = pair.opened(1)
    ticket = pair.granted(key, [3])
    pair.inbound.revoke(ticket.id, Cancelled("gone"))
    pair.lost(ticket, Cancelled)
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1])
    event = pair.prefill_events.expect(Aborted)
    assert isinstance(event.error, Cancelled | Stale)
    assert pair.untouched([3])


# lives and ends


def test_decode_that_joined_anew_knows_nothing_of_its_tickets(pair: Rig) -> None:
    key = pair.opened(1)
    ticket = pair.granted(key, [3])
    pair.outbound.ticket(key, ticket)
    pair.inbound.rejoin(pair.writer)
    pair.lost(ticket, Stale)
    pair.announce(key, [1])
    pair.aborted(key, Stale)
    late = pair.granted(pair.key(), [4])
    pair.lost(late, Stale)
    assert pair.untouched([3, 4])


def test_a_writer_that_joined_anew_gives_up_what_it_had(pair: Rig) -> None:
    key, waiting = pair.opened(1), pair.opened(1)
    ticket = pair.granted(key, [3])
    pair.outbound.ticket(key, ticket)
    pair.outbound.rejoin(pair.decode.incarnation)
    assert {pair.prefill_events.expect(Aborted).key for _ in range(2)} == {key, waiting}
    pair.lost(ticket, Stale)
    reborn = pair.opened(1)
    pair.outbound.ticket(reborn, pair.ticket(reborn, [4]))  # minted for the life before
    pair.aborted(reborn, Stale)


def test_the_coordinator_says_that_the_writer_is_gone(pair: Rig) -> None:
    ticket, other = pair.granted(pair.key(), [3]), replace(pair.ticket(pair.key(), [4]), writer=pair.decode.incarnation)
    pair.inbound.grant(other)
    pair.inbound.peer_gone(pair.writer)
    pair.lost(ticket, PeerGone)
    pair.inbound.revoke(other.id, Cancelled("done"))
    pair.lost(other, Cancelled)


def test_the_coordinator_says_that_decode_is_gone(pair: Rig) -> None:
    key, other = pair.opened(1), pair.opened(1)
    ticket = pair.granted(key, [3])
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1], layers=[0])
    assert pair.outbound.wait_landed(key, 0, timeout=30)
    pair.outbound.peer_gone(pair.decode.incarnation)
    pair.aborted(key, PeerGone)
    pair.outbound.abort(other, Cancelled("done"))
    pair.aborted(other, Cancelled)
    pair.inbound.revoke(ticket.id, Cancelled("done"))
    lost = pair.decode_events.expect(Lost)  # the writer's last word may reach a decode node that is not gone after all
    assert isinstance(lost.error, Cancelled | PeerGone)


def test_a_writer_that_closes_tells_decode_first(pair: Rig) -> None:
    key = pair.opened(1)
    ticket = pair.granted(key, [3], ttl=1000.0)
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1], layers=[0])
    assert pair.outbound.wait_landed(key, 0, timeout=30)
    pair.outbound.close()
    pair.aborted(key, HandoffFailed)
    pair.lost(ticket, HandoffFailed)
    pair.outbound.open(key, 4)
    pair.aborted(key, HandoffFailed)


def test_decode_that_closes_ends_every_ticket_and_every_writer(pair: Rig) -> None:
    key = pair.opened(1)
    ticket = pair.granted(key, [3])
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1], layers=[0])
    assert pair.outbound.wait_landed(key, 0, timeout=30)
    pair.inbound.close()
    pair.lost(ticket, HandoffFailed)
    assert isinstance(pair.prefill_events.expect(Aborted).error, HandoffFailed)
    late = pair.ticket(key, [4])
    pair.inbound.grant(late)
    event = pair.decode_events.expect(Lost)
    assert (event.ticket, event.fenced) == (late.id, pair.backend != "shm")


def test_nobody_listens_any_more(pair: Rig) -> None:
    key = pair.opened(1)
    ticket = pair.granted(key, [3])
    pair.inbound.close()
    pair.lost(ticket, HandoffFailed)
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1])
    assert isinstance(pair.prefill_events.expect(Aborted).error, HandoffFailed)
    assert pair.untouched([3])


# misuse


@pytest.mark.parametrize("announced", [[0, 1], [0, 1, 1], [0, 1, 2, 3]], ids=["too little", "twice", "too much"])
def test_a_seal_over_the_wrong_slabs_is_incomplete(pair: Rig, announced: list[int]) -> None:
    key = pair.opened(3)
    ticket = pair.granted(key, [10, 11, 12])
    pair.outbound.ticket(key, ticket)
    for block in announced:
        pair.announce(key, [block], first=block)
    pair.outbound.seal(key, SealInfo((1,)))
    pair.aborted(key, Incomplete)
    pair.lost(ticket, Incomplete)


def test_unknown_keys_and_tickets_are_counted_and_nothing_else(pair: Rig) -> None:
    stranger = pair.key()
    ticket = pair.ticket(stranger, [3])
    pair.outbound.ticket(stranger, ticket)
    pair.outbound.seal(stranger, SealInfo(()))
    pair.outbound.abort(stranger, Cancelled("x"))
    assert not pair.outbound.wait_landed(stranger, 0, timeout=5)
    pair.inbound.commit(ticket.id)
    pair.inbound.revoke(ticket.id, Cancelled("x"))
    eventually(lambda: pair.inbound.counters().get("ignored_revoke") == 1)
    assert pair.inbound.counters()["ignored_commit"] == 1
    assert pair.outbound.counters()["ignored_unknown"] == 2
    pair.works()


def test_blocks_outside_the_arenas_are_the_callers_error(pair: Rig) -> None:
    with pytest.raises(ValueError, match="no blocks of"):
        pair.inbound.grant(pair.ticket(pair.key(), [1 << 30]))
    key = pair.opened(1)
    with pytest.raises(ValueError, match="does not have"):
        pair.announce(key, [32])
    pair.outbound.abort(key, Cancelled("done"))
    pair.aborted(key, Cancelled)


def test_the_transport_is_the_pinned_one(pair: Rig) -> None:
    assert pair.inbound.choose_transport("anywhere") == pair.backend
