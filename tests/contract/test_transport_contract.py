"""The contract of every transport, tested with real sockets, segments and threads."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import (
    Cancelled,
    HandoffFailed,
    IncompleteTransfer,
    PeerUnreachable,
    StaleMessage,
)
from baton.kv.blocks import KVLayout
from kv_transfer.plane import (
    InboundLost,
    InboundSealed,
    InboundStarted,
    OutboundAborted,
    OutboundCommitted,
    SealInfo,
)
from tests.contract.transfer_pair import (
    FAST_SETTINGS,
    LAYOUT,
    ONE_SIDED,
    SEAL_INFO,
    TransferPair,
    transfer_pair,
    wait_until,
)

LAYERS = LAYOUT.num_layers
ONE_LAYER = replace(FAST_SETTINGS, layers_per_message=1)


def test_a_hand_off_lands_whole_and_commits(pair: TransferPair) -> None:
    source, target = [4, 9, 2], [7, 0, 31]
    key, ticket = pair.start_handoff(source, target)
    sealed = pair.decode_events.expect_event(InboundSealed)
    assert sealed.seal_info == SEAL_INFO
    assert pair.has_arrived(source, target)
    pair.inbound.commit_ticket(ticket.id)
    committed = pair.prefill_events.expect_event(OutboundCommitted)
    assert committed.key == key
    assert committed.stats.transport == pair.backend
    assert committed.stats.bytes_sent == sealed.bytes_landed == 3 * pair.layout.block_bytes
    assert committed.stats.slabs_sent == 3 * LAYERS
    assert pair.is_untouched([block for block in range(32) if block not in target])


def test_each_layer_lands_before_the_next_is_computed(backend: str, tmp_path: Path) -> None:
    """Each layer is announced when the one before has landed, so sending all at once would hang."""
    with transfer_pair(backend, tmp_path, settings=ONE_LAYER) as pair:
        source, target = [1, 2, 3, 4], [5, 6, 7, 8]
        key = pair.open_handoff(4)
        ticket = pair.grant_ticket(key, target)
        pair.outbound.set_ticket(key, ticket)
        for layer in range(LAYERS):
            pair.announce_layers(key, source, layers=[layer])
            assert pair.outbound.wait_for_layer(key, layer, timeout=30)
            if layer == 0:
                assert pair.decode_events.expect_event(InboundStarted) == InboundStarted(ticket.id)
        pair.outbound.seal_handoff(key, SealInfo((1,)))
        report = pair.finish_handoff(ticket).stats
        assert report.slabs_landed_before_last_layer == 4 * (LAYERS - 1)
        assert pair.has_arrived(source, target)


@pytest.mark.parametrize("held_blocks", [0, 1, 3])
@pytest.mark.parametrize("chunks", [[4], [1, 3], [2, 1, 1]], ids=str)
def test_only_what_decode_lacks_is_written(
    pair: TransferPair, held_blocks: int, chunks: list[int]
) -> None:
    """Decode holds a prefix whose end differs from the ends of prefill's chunks."""
    source, missing_target = [3, 1, 4, 15], [20, 21, 22, 23][held_blocks:]
    key = pair.open_handoff(4)
    ticket = pair.grant_ticket(key, missing_target, first_block=held_blocks)
    first = 0
    for number, size in enumerate(chunks):
        if number == len(chunks) - 1:
            pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, source[first : first + size], first)
        first += size
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    assert pair.finish_handoff(ticket).stats.bytes_sent == len(missing_target) * LAYOUT.block_bytes
    assert pair.has_arrived(source[held_blocks:], missing_target)
    assert pair.is_untouched([20, 21, 22, 23][:held_blocks])


def test_ticket_without_blocks_commits_at_once(pair: TransferPair) -> None:
    key = pair.open_handoff(2)
    ticket = pair.grant_ticket(key, [], first_block=2)
    pair.announce_layers(key, [1, 2])
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    pair.outbound.set_ticket(key, ticket)
    assert pair.finish_handoff(ticket).stats.bytes_sent == 0


def test_slabs_announced_before_the_ticket_are_sent_once_it_arrives(pair: TransferPair) -> None:
    key = pair.open_handoff(3)
    pair.announce_layers(key, [6, 7, 8])
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    assert not pair.outbound.wait_for_layer(key, 0, timeout=0.01)
    ticket = pair.grant_ticket(key, [1, 2, 3])
    pair.outbound.set_ticket(key, ticket)
    pair.finish_handoff(ticket)
    assert pair.has_arrived([6, 7, 8], [1, 2, 3])


@pytest.mark.parametrize("layers_per_message", [0, 1, 2])
@pytest.mark.parametrize("slabs_per_message", [1, 3, 1000])
def test_messages_of_any_size_carry_the_same(
    backend: str, layers_per_message: int, slabs_per_message: int, tmp_path: Path
) -> None:
    payload = slabs_per_message * LAYOUT.slab_bytes
    settings = replace(
        FAST_SETTINGS, layers_per_message=layers_per_message, max_payload_bytes=payload
    )
    settings = replace(settings, credit_bytes=2 * payload)
    with transfer_pair(backend, tmp_path, settings=settings) as pair:
        source, target = [8, 6, 7, 5, 3], [0, 9, 2, 4, 1]
        _, ticket = pair.start_handoff(source, target)
        pair.finish_handoff(ticket)
        assert pair.has_arrived(source, target)


def test_two_hand_offs_at_once_do_not_mix(pair: TransferPair) -> None:
    first, second = pair.open_handoff(4), pair.open_handoff(4)
    blocks = {first: ([0, 1, 2, 3], [10, 11, 12, 13]), second: ([4, 5, 6, 7], [14, 15, 16, 17])}
    tickets = {key: pair.grant_ticket(key, target) for key, (_, target) in blocks.items()}
    for layer in range(LAYERS):
        for key, (source, _) in blocks.items():
            pair.announce_layers(key, source, layers=[layer])
            if layer == 1:
                pair.outbound.set_ticket(key, tickets[key])
    for key in blocks:
        pair.outbound.seal_handoff(key, SealInfo((1,)))
    for _ in blocks:
        pair.inbound.commit_ticket(pair.decode_events.expect_event(InboundSealed).ticket_id)
    assert {pair.prefill_events.expect_event(OutboundCommitted).key for _ in blocks} == set(blocks)
    for source, target in blocks.values():
        assert pair.has_arrived(source, target)


def test_one_of_two_hand_offs_is_cancelled_and_the_other_is_whole(pair: TransferPair) -> None:
    aborted_key, committed_key = pair.open_handoff(2), pair.open_handoff(2)
    lost, kept = (
        pair.grant_ticket(aborted_key, [10, 11]),
        pair.grant_ticket(committed_key, [12, 13]),
    )
    for key, ticket in ((aborted_key, lost), (committed_key, kept)):
        pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, [1, 2], layers=[0])
    pair.outbound.abort_handoff(aborted_key, Cancelled("the client left"))
    pair.expect_aborted(aborted_key, Cancelled)
    pair.expect_lost(lost, Cancelled)
    pair.announce_layers(committed_key, [1, 2], layers=[1, 2])
    pair.outbound.seal_handoff(committed_key, SealInfo((1,)))
    pair.finish_handoff(kept)
    assert pair.has_arrived([1, 2], [12, 13])


def test_a_thousand_hand_offs(backend: str, tmp_path: Path) -> None:
    """A few at a time over the same few blocks. Each is checked, and no frame was out of place."""
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=2, dtype="float32")
    with transfer_pair(backend, tmp_path, layout=layout) as pair:
        free, running, ended = list(range(0, 32, 2)), {}, 0
        for number in range(1000):
            at, source = free.pop(), [(7 * number) % 31, (11 * number + 5) % 31]
            _, ticket = pair.start_handoff(source, [at, at + 1])
            running[ticket.id] = (source, at)
            if len(running) < 8 and number < 999:
                continue
            while running and (len(running) >= 8 or number == 999):
                done = pair.decode_events.expect_event(InboundSealed).ticket_id
                source, at = running.pop(done)
                assert pair.has_arrived(source, [at, at + 1])
                pair.inbound.commit_ticket(done)
                pair.prefill_events.expect_event(OutboundCommitted)
                free.append(at)
                ended += 1
        assert ended == 1000
        counters = pair.inbound.counters()
        assert counters["slabs_landed"] == 1000 * 4
        counters.pop("ignored_late", None)  # a writer may renew what has just been committed
        assert not [
            name for name in counters if name.startswith(("ignored", "refused", "bad", "lost"))
        ]


# incarnations and ends


def test_rejoined_decode_drops_its_tickets(pair: TransferPair) -> None:
    key = pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3])
    pair.outbound.set_ticket(key, ticket)
    pair.inbound.rejoin(pair.writer_incarnation)
    pair.expect_lost(ticket, StaleMessage)
    pair.announce_layers(key, [1])
    pair.expect_aborted(key, StaleMessage)
    late = pair.grant_ticket(pair.new_key(), [4])
    pair.expect_lost(late, StaleMessage)
    assert pair.is_untouched([3, 4])


def test_rejoined_writer_aborts_its_handoffs(pair: TransferPair) -> None:
    key, waiting = pair.open_handoff(1), pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3])
    pair.outbound.set_ticket(key, ticket)
    pair.outbound.rejoin(pair.decode_address.incarnation)
    assert {pair.prefill_events.expect_event(OutboundAborted).key for _ in range(2)} == {
        key,
        waiting,
    }
    pair.expect_lost(ticket, StaleMessage)
    reborn = pair.open_handoff(1)
    pair.outbound.set_ticket(reborn, pair.make_ticket(reborn, [4]))  # for the earlier incarnation
    pair.expect_aborted(reborn, StaleMessage)


def test_the_coordinator_says_that_the_writer_is_gone(pair: TransferPair) -> None:
    ticket, other = (
        pair.grant_ticket(pair.new_key(), [3]),
        replace(
            pair.make_ticket(pair.new_key(), [4]),
            writer_incarnation=pair.decode_address.incarnation,
        ),
    )
    pair.inbound.grant_ticket(other)
    pair.inbound.on_peer_gone(pair.writer_incarnation)
    pair.expect_lost(ticket, PeerUnreachable)
    pair.inbound.revoke_ticket(other.id, Cancelled("done"))
    pair.expect_lost(other, Cancelled)


def test_the_coordinator_says_that_decode_is_gone(pair: TransferPair) -> None:
    key, other = pair.open_handoff(1), pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3])
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1], layers=[0])
    assert pair.outbound.wait_for_layer(key, 0, timeout=30)
    pair.outbound.on_peer_gone(pair.decode_address.incarnation)
    pair.expect_aborted(key, PeerUnreachable)
    pair.outbound.abort_handoff(other, Cancelled("done"))
    pair.expect_aborted(other, Cancelled)
    pair.inbound.revoke_ticket(ticket.id, Cancelled("done"))
    # The writer's Abort may reach a decode node that is not gone after all.
    lost = pair.decode_events.expect_event(InboundLost)
    assert isinstance(lost.error, Cancelled | PeerUnreachable)


def test_a_writer_that_closes_tells_decode_first(pair: TransferPair) -> None:
    key = pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3], ttl=1000.0)
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1], layers=[0])
    assert pair.outbound.wait_for_layer(key, 0, timeout=30)
    pair.outbound.close()
    pair.expect_aborted(key, HandoffFailed)
    pair.expect_lost(ticket, HandoffFailed)
    pair.outbound.open_handoff(key, 4)
    pair.expect_aborted(key, HandoffFailed)


def test_decode_that_closes_ends_every_ticket_and_every_writer(pair: TransferPair) -> None:
    key = pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3])
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1], layers=[0])
    assert pair.outbound.wait_for_layer(key, 0, timeout=30)
    pair.inbound.close()
    pair.expect_lost(ticket, HandoffFailed)
    assert isinstance(pair.prefill_events.expect_event(OutboundAborted).error, HandoffFailed)
    late = pair.make_ticket(key, [4])
    pair.inbound.grant_ticket(late)
    event = pair.decode_events.expect_event(InboundLost)
    assert (event.ticket_id, event.is_fenced) == (late.id, pair.backend not in ONE_SIDED)


def test_dialling_a_closed_endpoint_aborts(pair: TransferPair) -> None:
    key = pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3])
    pair.inbound.close()
    pair.expect_lost(ticket, HandoffFailed)
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1])
    assert isinstance(pair.prefill_events.expect_event(OutboundAborted).error, HandoffFailed)
    assert pair.is_untouched([3])


# misuse


@pytest.mark.parametrize(
    "announced", [[0, 1], [0, 1, 1], [0, 1, 2, 3]], ids=["too little", "twice", "too much"]
)
def test_a_seal_over_the_wrong_slabs_is_incomplete(
    pair: TransferPair, announced: list[int]
) -> None:
    key = pair.open_handoff(3)
    ticket = pair.grant_ticket(key, [10, 11, 12])
    pair.outbound.set_ticket(key, ticket)
    for block in announced:
        pair.announce_layers(key, [block], first=block)
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    pair.expect_aborted(key, IncompleteTransfer)
    pair.expect_lost(ticket, IncompleteTransfer)


def test_unknown_keys_and_tickets_are_counted_and_nothing_else(pair: TransferPair) -> None:
    unknown_key = pair.new_key()
    ticket = pair.make_ticket(unknown_key, [3])
    pair.outbound.set_ticket(unknown_key, ticket)
    pair.outbound.seal_handoff(unknown_key, SealInfo(()))
    pair.outbound.abort_handoff(unknown_key, Cancelled("x"))
    assert not pair.outbound.wait_for_layer(unknown_key, 0, timeout=5)
    pair.inbound.commit_ticket(ticket.id)
    pair.inbound.revoke_ticket(ticket.id, Cancelled("x"))
    wait_until(lambda: pair.inbound.counters().get("ignored_revoke") == 1)
    assert pair.inbound.counters()["ignored_commit"] == 1
    assert pair.outbound.counters()["ignored_unknown"] == 2
    pair.check_full_handoff()


def test_blocks_outside_the_arenas_are_the_callers_error(pair: TransferPair) -> None:
    with pytest.raises(ValueError, match="not in this arena"):
        pair.inbound.grant_ticket(pair.make_ticket(pair.new_key(), [1 << 30]))
    key = pair.open_handoff(1)
    with pytest.raises(ValueError, match="does not have"):
        pair.announce_layers(key, [32])
    pair.outbound.abort_handoff(key, Cancelled("done"))
    pair.expect_aborted(key, Cancelled)


def test_the_transport_is_the_pinned_one(pair: TransferPair) -> None:
    assert pair.inbound.choose_transport("anywhere") == pair.backend
