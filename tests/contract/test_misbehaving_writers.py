"""Writers that break the protocol, come late or are of another incarnation, and damaged messages.

No wrong byte is ever sealed, the process survives and the next hand-off works.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    HandoffFailed,
    IncompleteTransfer,
    LayoutMismatch,
    UnmappableSegment,
)
from kv_transfer.core import frames
from kv_transfer.core.slabs import SlabRange
from kv_transfer.plane import InboundLost, InboundSealed, OutboundAborted, SealInfo
from tests.contract.raw_writer import RawWriter
from tests.contract.transfer_pair import (
    BACKENDS,
    FAST_SETTINGS,
    TransferPair,
    transfer_pair,
    wait_until,
)

BLOCKS = [3, 4]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(backend: str, tmp_path: Path) -> Iterator[TransferPair]:
    with transfer_pair(backend, tmp_path) as opened:
        yield opened


@pytest.fixture
def writer(pair: TransferPair) -> Iterator[RawWriter]:
    """A writer that has sent Open, with a ticket for logical blocks 1 and 2; decode has block 0."""
    ticket = pair.grant_ticket(pair.new_key(attempt=1), BLOCKS, first_block=1)
    with RawWriter(pair, ticket) as raw_writer:
        raw_writer.send_open()
        yield raw_writer


ALL_SLABS = SlabRange(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"first_block": 0}, LayoutMismatch),  # before what the ticket allows
        ({"first_block": 2}, LayoutMismatch),  # beyond its end
        ({"first_layer": 1}, LayoutMismatch),
        ({"num_layers": 4}, LayoutMismatch),
        ({"num_layers": 0}, LayoutMismatch),
        ({"num_blocks": 0}, LayoutMismatch),
        ({"first_block": 2**31 - 1, "num_blocks": 2**31 - 1}, LayoutMismatch),
        ({"payload_bytes": 1}, LayoutMismatch),
        ({"first_kv_head": 1}, LayoutMismatch),
        ({"num_kv_heads": 1}, LayoutMismatch),
        ({"checksum": 1}, ChecksumMismatch),
    ],
    ids=str,
)
def test_a_write_that_is_wrong_loses_the_ticket(
    pair: TransferPair, writer: RawWriter, wrong: dict[str, int], error: type[BatonError]
) -> None:
    writer.send_write(ALL_SLABS, **wrong)
    pair.expect_lost(writer.ticket, error)
    writer.expect_refused(error.code)
    if not writer.is_one_sided:
        assert pair.is_untouched(list(range(26)))
    pair.check_full_handoff()


@pytest.mark.parametrize(
    "wrong",
    [
        {"writer_incarnation": "another"},
        {"decode_incarnation": "another"},
        {"attempt": 0},
        {"attempt": 2},
        {"ticket_id": "f" * 32},
    ],
    ids=str,
)
def test_frame_of_another_incarnation_is_refused(
    pair: TransferPair, writer: RawWriter, wrong: dict[str, int | str]
) -> None:
    stale, payload = writer.make_write_frame(ALL_SLABS)
    writer.send(msgspec.structs.replace(stale, **wrong), None if writer.is_one_sided else payload)
    writer.expect_refused("stale")
    assert pair.is_untouched(BLOCKS) or writer.is_one_sided
    writer.send(
        msgspec.structs.replace(
            frames.AbortFrame(*writer.frame_ids, code="cancelled", message=""), **wrong
        )
    )
    writer.expect_refused("stale")
    writer.send_all_writes()
    writer.send_seal()
    assert pair.decode_events.expect_event(InboundSealed).ticket_id == writer.ticket.id
    assert pair.has_arrived([1, 2], BLOCKS)
    pair.inbound.commit_ticket(writer.ticket.id)
    assert isinstance(writer.receive_frame(), frames.CommittedFrame)


@pytest.mark.parametrize("wrong", [{"num_slabs": 5}, {"payload_bytes": 1}, {"digest": 1}], ids=str)
def test_a_manifest_that_is_not_what_landed_is_incomplete(
    pair: TransferPair, writer: RawWriter, wrong: dict[str, int]
) -> None:
    writer.send_all_writes()
    writer.send_seal(**wrong)
    pair.expect_lost(writer.ticket, IncompleteTransfer)
    writer.expect_refused("incomplete")


def test_a_missing_slab_is_incomplete(pair: TransferPair, writer: RawWriter) -> None:
    writer.send_write(SlabRange(0, 3, 1, 1))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    writer.send_write(SlabRange(0, 2, 2, 1))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    writer.send_seal()
    pair.expect_lost(writer.ticket, IncompleteTransfer)


def test_duplicate_write_is_ignored(pair: TransferPair, writer: RawWriter) -> None:
    writer.send_write(SlabRange(0, 1, 1, 2))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    before = pair.decode_arena[BLOCKS].copy()
    frame, payload = writer.make_write_frame(SlabRange(0, 1, 1, 2))
    writer.send(frame, None if writer.is_one_sided else bytes(len(payload)))
    writer.send_write(SlabRange(1, 2, 1, 2))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    assert (pair.decode_arena[BLOCKS, 0] == before[:, 0]).all()
    assert pair.inbound.counters()["ignored_duplicate"] == 1
    writer.send_seal()
    sealed = pair.decode_events.expect_event(InboundSealed)
    assert sealed.bytes_landed == 2 * pair.layout.block_bytes
    assert pair.has_arrived([1, 2], BLOCKS)


def test_a_write_that_overlaps_what_has_landed_loses_the_ticket(
    pair: TransferPair, writer: RawWriter
) -> None:
    writer.send_write(SlabRange(0, 1, 1, 2))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    writer.send_write(SlabRange(0, 2, 1, 2))
    pair.expect_lost(writer.ticket, IncompleteTransfer)


@pytest.mark.parametrize("wrong", [{"version": 99}, {"num_layers": 4}, {"slab_bytes": 1}], ids=str)
def test_another_geometry_or_protocol_is_refused_by_name(
    pair: TransferPair, wrong: dict[str, int]
) -> None:
    ticket = pair.grant_ticket(pair.new_key(), BLOCKS)
    with RawWriter(pair, ticket) as writer:
        right = frames.OpenFrame(
            *writer.frame_ids,
            frames.PROTOCOL_VERSION,
            3,
            pair.layout.slab_bytes,
            window_bytes=1,
            host_id="",
            writer_process=pair.writer_name,
        )
        writer.send(msgspec.structs.replace(right, **wrong))
        pair.expect_lost(ticket, LayoutMismatch)
        writer.expect_refused("layout_mismatch")


def test_the_open_of_an_older_writer_is_taken_but_for_a_device(pair: TransferPair) -> None:
    """Version 1 names no process: nodes are upgraded one by one, decode nodes first."""
    ticket = pair.grant_ticket(pair.new_key(), BLOCKS)
    with RawWriter(pair, ticket) as writer:
        slab_bytes = pair.layout.slab_bytes
        older = ("open", *writer.frame_ids, 1, pair.layout.num_layers, slab_bytes, 1 << 20, "host")
        writer.send_bytes(msgspec.msgpack.encode(older))
        if pair.backend == "cuda_ipc":
            pair.expect_lost(ticket, UnmappableSegment)
            writer.expect_refused("unmappable")
            return
        assert isinstance(writer.receive_frame(), frames.CreditFrame)
        slabs = SlabRange(0, pair.layout.num_layers, 0, len(BLOCKS))
        writer.send_write(slabs)
        writer.send_seal()
        assert pair.decode_events.expect_event(InboundSealed).ticket_id == ticket.id
        pair.inbound.commit_ticket(ticket.id)


def test_payload_present_or_missing_against_the_frame(
    pair: TransferPair, writer: RawWriter
) -> None:
    frame, payload = writer.make_write_frame(ALL_SLABS)
    writer.send(frame, payload if writer.is_one_sided else None)
    lost = pair.decode_events.expect_event(InboundLost)
    assert isinstance(lost.error, ChecksumMismatch)


@pytest.mark.parametrize(
    "header", [b"", b"\x00", b"\xc1" * 50, b"\x80\x04\x95", b"\x9a\xa4\x80pen"], ids=repr
)
def test_garbage_is_counted_and_dropped(
    pair: TransferPair, writer: RawWriter, header: bytes
) -> None:
    writer.send_bytes(header)
    writer.send_bytes(header, bytes(100_000))
    writer.send_all_writes()
    writer.send_seal()
    pair.decode_events.expect_event(InboundSealed)
    assert pair.inbound.counters()["bad_frames"] == 2


# faults on the way, by failpoints


@dataclass(frozen=True)
class TransferFault:
    failpoints: str
    expected_error: type[BatonError] | None  # decode's; None: the hand-off commits


FAULTS = [
    TransferFault("transfer.write.before=corrupt*1", ChecksumMismatch),
    TransferFault("transfer.write.before=drop*1", IncompleteTransfer),
    TransferFault("transfer.write.before=duplicate*1", None),
    TransferFault("transfer.write.before=error*1", HandoffFailed),
    TransferFault("transfer.write.after=error*1", HandoffFailed),
    TransferFault("transfer.write.before=delay(0.05)*1", None),
    TransferFault("transfer.land.before=corrupt*1", ChecksumMismatch),
    TransferFault("transfer.land.before=drop*1", IncompleteTransfer),
    TransferFault("transfer.land.before=duplicate*1", None),
    TransferFault("transfer.land.before=error*1", HandoffFailed),
    TransferFault("transfer.land.after=error*1", HandoffFailed),
    TransferFault("transfer.seal.before=duplicate*1", None),
    TransferFault("transfer.seal.before=error*1", HandoffFailed),
    TransferFault("transfer.commit.before=duplicate*1", None),
    TransferFault("transfer.commit.before=delay(0.05)*1", None),
    TransferFault("transfer.commit.after=error*1", None),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.failpoints)
def test_a_fault_on_the_way_never_seals_a_wrong_byte(
    backend: str, fault: TransferFault, tmp_path: Path
) -> None:
    with transfer_pair(backend, tmp_path, failpoints=fault.failpoints) as pair:
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        if fault.expected_error is None:
            assert pair.finish_handoff(ticket).key == key
            assert pair.has_arrived([1, 2], BLOCKS)
        else:
            pair.expect_lost_and_fenced(ticket, fault.expected_error)
            assert pair.prefill_events.expect_event(OutboundAborted).key == key
        pair.check_full_handoff()
        assert pair.decode_events.drain_unexpected() == []
        assert pair.prefill_events.drain_unexpected() == []


@pytest.mark.parametrize("action", ["drop", "corrupt", "error"])
def test_a_commit_that_does_not_arrive_ends_the_writers_wait(
    backend: str, action: str, tmp_path: Path
) -> None:
    """Decode has committed, and the writer never learns it: it aborts once, by progress_timeout."""
    short_timeout = replace(FAST_SETTINGS, progress_timeout=1.0)
    armed = f"transfer.commit.before={action}+1*1"
    with transfer_pair(
        backend, tmp_path, outbound_settings=short_timeout, failpoints=armed
    ) as pair:
        pair.check_full_handoff()  # there is a link
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        pair.decode_events.expect_event(InboundSealed)
        pair.inbound.commit_ticket(ticket.id)
        assert pair.prefill_events.expect_event(OutboundAborted).key == key
        assert pair.has_arrived([1, 2], BLOCKS)


@pytest.mark.parametrize("action", ["drop", "corrupt"])
def test_a_seal_that_does_not_arrive_ends_both_sides(
    backend: str, action: str, tmp_path: Path
) -> None:
    short_timeout = replace(FAST_SETTINGS, progress_timeout=0.2)
    quick = replace(FAST_SETTINGS, progress_timeout=1.0, ticket_ttl=1.0)
    armed = f"transfer.seal.before={action}*1"
    with transfer_pair(
        backend, tmp_path, settings=quick, outbound_settings=short_timeout, failpoints=armed
    ) as pair:
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        assert pair.prefill_events.expect_event(OutboundAborted).key == key
        assert pair.decode_events.expect_event(InboundLost).ticket_id == ticket.id


def test_invalid_frames_to_the_writer(pair: TransferPair) -> None:
    """A Seal over missing layers aborts the hand-off on both sides."""
    key = pair.open_handoff(2)
    ticket = pair.grant_ticket(key, BLOCKS)
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1, 2], layers=[0])
    assert pair.outbound.wait_for_layer(key, 0, timeout=30)
    # Layers are missing: a programming error of the role.
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    pair.expect_aborted(key, IncompleteTransfer)
    pair.expect_lost(ticket, IncompleteTransfer)
    wait_until(lambda: pair.outbound.counters().get("aborted_incomplete") == 1)
