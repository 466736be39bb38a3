"""When prefill gives decode up for not answering."""

from baton.errors import PeerUnreachable
from baton.types import (
    AttemptKey,
    BlockIndex,
    Incarnation,
    NodeName,
    PeerAddress,
    RequestId,
    SegmentRef,
    Ticket,
    TicketId,
)
from kv_transfer.core import frames
from kv_transfer.core.handoff_common import ArenaShape
from kv_transfer.core.outbound_handoff import OutboundHandoff
from kv_transfer.core.send_queue import ReadySlabs, SendSettings
from kv_transfer.core.writer_lock import NoLock

TIMEOUT = 5.0
SLAB_BYTES = 64


def make_handoff() -> OutboundHandoff:
    """One block of two layers, whose ticket came at 0 seconds."""
    settings = SendSettings(
        max_payload_bytes=SLAB_BYTES,
        layers_per_message=0,
        window_bytes=1 << 20,
        renew_interval=1.0,
        initial_window_bytes=0,
        answer_timeout=TIMEOUT,
    )
    key, writer, decode = AttemptKey(RequestId("r"), 0, 0), Incarnation("w"), Incarnation("d")
    handoff = OutboundHandoff(key, writer, ArenaShape(2, 1, SLAB_BYTES), 1, settings)
    ticket = Ticket(
        id=TicketId("0" * 32),
        key=key,
        decode_peer=PeerAddress(NodeName("decode-0"), decode, "host", "memory://x"),
        writer_incarnation=writer,
        first_block=0,
        block_offsets=(0,),
        num_tokens=16,
        ttl_seconds=10.0,
        transport="cuda_ipc",
        segment=SegmentRef("segment", decode),
        fence_byte=0,
    )
    handoff.set_ticket(ticket, NoLock(), 0.0)
    return handoff


def credit(handoff: OutboundHandoff, now: float) -> None:
    ids = ("0" * 32, 0, "w", "d")
    handoff.on_frame(frames.CreditFrame(*ids, window_bytes=1 << 20), now)


def test_a_first_layer_that_is_computed_late_may_take_its_time_to_be_written() -> None:
    """A device writes for a while, and decode has nothing to answer before that has begun."""
    handoff = make_handoff()
    credit(handoff, 0.1)
    late = 0.1 + 3 * TIMEOUT
    for second in range(int(late)):
        assert handoff.tick(float(second)) in ([], [frames.RenewFrame("0" * 32, 0, "w", "d")])
    handoff.announce_slabs(ReadySlabs(0, 0, (BlockIndex(7),)), late)
    write, _ = handoff.begin_write(late)
    assert write is not None
    assert not handoff.is_answer_overdue(late + 0.001)
    handoff.tick(late + 0.001)
    assert handoff.error is None
    frame, *_ = handoff.finish_write(write, 1, False, late + 0.002)
    assert isinstance(frame, frames.WriteFrame)


def test_decode_that_answers_no_write_is_given_up() -> None:
    handoff = make_handoff()
    credit(handoff, 0.1)
    handoff.announce_slabs(ReadySlabs(0, 0, (BlockIndex(7),)), 20.0)
    first, _ = handoff.begin_write(20.0)
    assert first is not None
    handoff.finish_write(first, 1, False, 20.0)
    handoff.announce_slabs(ReadySlabs(1, 0, (BlockIndex(7),)), 24.0)
    second, _ = handoff.begin_write(24.0)
    assert second is not None, "a write more puts nothing off"
    assert not handoff.is_answer_overdue(24.9)
    handoff.tick(20.0 + TIMEOUT)
    assert isinstance(handoff.error, PeerUnreachable)


def test_decode_that_gives_no_credit_is_given_up() -> None:
    handoff = make_handoff()
    assert not handoff.is_answer_overdue(TIMEOUT - 0.1)
    handoff.tick(TIMEOUT)
    assert isinstance(handoff.error, PeerUnreachable)
