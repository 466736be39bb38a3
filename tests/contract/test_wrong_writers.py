"""Writers that are wrong, late, or somebody else; and messages that arrive broken. Whatever they do, no wrong byte is
ever sealed, the process lives and the next hand-off works."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from baton.errors import BatonError, ChecksumMismatch, HandoffFailed, Incomplete, LayoutMismatch
from kv_transfer.core import frames
from kv_transfer.core.slabs import Rectangle
from kv_transfer.plane import Aborted, Lost, Sealed, SealInfo
from tests.contract.raw_writer import RawWriter
from tests.contract.rig import BACKENDS, QUICK, Rig, eventually, rig

BLOCKS = [3, 4]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(backend: str, tmp_path: Path) -> Iterator[Rig]:
    with rig(backend, tmp_path) as made:
        yield made


@pytest.fixture
def writer(pair: Rig) -> Iterator[RawWriter]:
    """Open, with a ticket for logical blocks 1 and 2 (decode holds block 0)."""
    with RawWriter(pair, pair.granted(pair.key(attempt=1), BLOCKS, first_block=1)) as made:
        made.open()
        yield made


ALL = Rectangle(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"block": 0}, LayoutMismatch),  # before what the ticket allows
        ({"block": 2}, LayoutMismatch),  # beyond its end
        ({"layer": 1}, LayoutMismatch),
        ({"layers": 4}, LayoutMismatch),
        ({"layers": 0}, LayoutMismatch),
        ({"blocks": 0}, LayoutMismatch),
        ({"block": 2**31 - 1, "blocks": 2**31 - 1}, LayoutMismatch),
        ({"size": 1}, LayoutMismatch),
        ({"head": 1}, LayoutMismatch),
        ({"heads": 1}, LayoutMismatch),
        ({"checksum": 1}, ChecksumMismatch),
    ],
    ids=str,
)
def test_a_write_that_is_wrong_loses_the_ticket(
    pair: Rig, writer: RawWriter, wrong: dict[str, int], error: type[BatonError]
) -> None:
    writer.write(ALL, **wrong)
    pair.lost(writer.ticket, error)
    writer.refused(error.code)
    if not writer.one_sided:
        assert pair.untouched(list(range(26)))
    pair.works()


@pytest.mark.parametrize(
    "wrong",
    [{"writer": "somebody"}, {"decode": "somebody"}, {"attempt": 0}, {"attempt": 2}, {"ticket": "f" * 32}],
    ids=str,
)
def test_a_frame_of_another_life_is_refused_and_harms_nobody(
    pair: Rig, writer: RawWriter, wrong: dict[str, int | str]
) -> None:
    stale, payload = writer.write_frame(ALL)
    writer.send(msgspec.structs.replace(stale, **wrong), None if writer.one_sided else payload)
    writer.refused("stale")
    assert pair.untouched(BLOCKS) or writer.one_sided
    writer.send(msgspec.structs.replace(frames.Abort(*writer.ids, code="cancelled", message=""), **wrong))
    writer.refused("stale")
    writer.write_all()
    writer.seal()
    assert pair.decode_events.expect(Sealed).ticket == writer.ticket.id
    assert pair.arrived([1, 2], BLOCKS)
    pair.inbound.commit(writer.ticket.id)
    assert isinstance(writer.answer(), frames.Committed)


@pytest.mark.parametrize("wrong", [{"slabs": 5}, {"size": 1}, {"digest": 1}], ids=str)
def test_a_manifest_that_is_not_what_landed_is_incomplete(pair: Rig, writer: RawWriter, wrong: dict[str, int]) -> None:
    writer.write_all()
    writer.seal(**wrong)
    pair.lost(writer.ticket, Incomplete)
    writer.refused("incomplete")


def test_a_missing_slab_is_incomplete(pair: Rig, writer: RawWriter) -> None:
    writer.write(Rectangle(0, 3, 1, 1))
    assert isinstance(writer.answer(), frames.Landed)
    writer.write(Rectangle(0, 2, 2, 1))
    assert isinstance(writer.answer(), frames.Landed)
    writer.seal()
    pair.lost(writer.ticket, Incomplete)


def test_a_slab_that_comes_again_is_not_counted_and_does_not_land(pair: Rig, writer: RawWriter) -> None:
    writer.write(Rectangle(0, 1, 1, 2))
    assert isinstance(writer.answer(), frames.Landed)
    before = pair.target[BLOCKS].copy()
    frame, payload = writer.write_frame(Rectangle(0, 1, 1, 2))
    writer.send(frame, None if writer.one_sided else bytes(len(payload)))
    writer.write(Rectangle(1, 2, 1, 2))
    assert isinstance(writer.answer(), frames.Landed)
    assert (pair.target[BLOCKS, 0] == before[:, 0]).all()
    assert pair.inbound.counters()["ignored_duplicate"] == 1
    writer.seal()
    sealed = pair.decode_events.expect(Sealed)
    assert sealed.bytes_landed == 2 * pair.layout.block_bytes
    assert pair.arrived([1, 2], BLOCKS)


def test_a_write_that_overlaps_what_has_landed_loses_the_ticket(pair: Rig, writer: RawWriter) -> None:
    writer.write(Rectangle(0, 1, 1, 2))
    assert isinstance(writer.answer(), frames.Landed)
    writer.write(Rectangle(0, 2, 1, 2))
    pair.lost(writer.ticket, Incomplete)


@pytest.mark.parametrize("wrong", [{"version": 99}, {"num_layers": 4}, {"slab_bytes": 1}], ids=str)
def test_another_geometry_or_protocol_is_refused_by_name(pair: Rig, wrong: dict[str, int]) -> None:
    ticket = pair.granted(pair.key(), BLOCKS)
    with RawWriter(pair, ticket) as writer:
        right = frames.Open(*writer.ids, 1, 3, pair.layout.slab_bytes, window=1, host="")
        writer.send(msgspec.structs.replace(right, **wrong))
        pair.lost(ticket, LayoutMismatch)
        writer.refused("layout_mismatch")


def test_payloads_where_none_belong_and_none_where_one_does(pair: Rig, writer: RawWriter) -> None:
    frame, payload = writer.write_frame(ALL)
    writer.send(frame, payload if writer.one_sided else None)
    lost = pair.decode_events.expect(Lost)
    assert isinstance(lost.error, ChecksumMismatch)


@pytest.mark.parametrize("header", [b"", b"\x00", b"\xc1" * 50, b"\x80\x04\x95", b"\x9a\xa4\x80pen"], ids=repr)
def test_garbage_is_counted_and_dropped(pair: Rig, writer: RawWriter, header: bytes) -> None:
    writer.send_bytes(header)
    writer.send_bytes(header, bytes(100_000))
    writer.write_all()
    writer.seal()
    pair.decode_events.expect(Sealed)
    assert pair.inbound.counters()["bad_frames"] == 2


# failpoints: what happens on the way


@dataclass(frozen=True)
class Fault:
    armed: str
    error: type[BatonError] | None  # how decode's side ends; None: the hand-off commits all the same


FAULTS = [
    Fault("transfer.write.before=corrupt*1", ChecksumMismatch),
    Fault("transfer.write.before=drop*1", Incomplete),
    Fault("transfer.write.before=duplicate*1", None),
    Fault("transfer.write.before=error*1", HandoffFailed),
    Fault("transfer.write.after=error*1", HandoffFailed),
    Fault("transfer.write.before=delay(0.05)*1", None),
    Fault("transfer.land.before=corrupt*1", ChecksumMismatch),
    Fault("transfer.land.before=drop*1", Incomplete),
    Fault("transfer.land.before=duplicate*1", None),
    Fault("transfer.land.before=error*1", HandoffFailed),
    Fault("transfer.land.after=error*1", HandoffFailed),
    Fault("transfer.seal.before=duplicate*1", None),
    Fault("transfer.seal.before=error*1", HandoffFailed),
    Fault("transfer.commit.before=duplicate*1", None),
    Fault("transfer.commit.before=delay(0.05)*1", None),
    Fault("transfer.commit.after=error*1", None),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.armed)
def test_a_fault_on_the_way_never_seals_a_wrong_byte(backend: str, fault: Fault, tmp_path: Path) -> None:
    with rig(backend, tmp_path, failpoints=fault.armed) as pair:
        key, ticket = pair.hand_off([1, 2], BLOCKS)
        if fault.error is None:
            assert pair.finish(ticket).key == key
            assert pair.arrived([1, 2], BLOCKS)
        else:
            pair.lost(ticket, fault.error)
            assert pair.prefill_events.expect(Aborted).key == key
        pair.works()
        assert pair.decode_events.rest() == []
        assert pair.prefill_events.rest() == []


@pytest.mark.parametrize("action", ["drop", "corrupt", "error"])
def test_a_commit_that_does_not_arrive_ends_the_writers_wait(backend: str, action: str, tmp_path: Path) -> None:
    """Decode has committed and the writer cannot know: it gives up after its progress_timeout, and ends once."""
    impatient = replace(QUICK, progress_timeout=1.0)
    armed = f"transfer.commit.before={action}+1*1"
    with rig(backend, tmp_path, outbound_settings=impatient, failpoints=armed) as pair:
        pair.works()  # there is a link
        key, ticket = pair.hand_off([1, 2], BLOCKS)
        pair.decode_events.expect(Sealed)
        pair.inbound.commit(ticket.id)
        assert pair.prefill_events.expect(Aborted).key == key
        assert pair.arrived([1, 2], BLOCKS)


@pytest.mark.parametrize("action", ["drop", "corrupt"])
def test_a_seal_that_does_not_arrive_ends_both_sides(backend: str, action: str, tmp_path: Path) -> None:
    impatient = replace(QUICK, progress_timeout=0.2)
    soon = replace(QUICK, progress_timeout=1.0, ticket_ttl=1.0)
    armed = f"transfer.seal.before={action}*1"
    with rig(backend, tmp_path, settings=soon, outbound_settings=impatient, failpoints=armed) as pair:
        key, ticket = pair.hand_off([1, 2], BLOCKS)
        assert pair.prefill_events.expect(Aborted).key == key
        assert pair.decode_events.expect(Lost).ticket == ticket.id


def test_frames_for_the_writer_that_make_no_sense(pair: Rig) -> None:
    """Landed for what was never sent gives the hand-off up; the rest is ignored."""
    key = pair.opened(2)
    ticket = pair.granted(key, BLOCKS)
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1, 2], layers=[0])
    assert pair.outbound.wait_landed(key, 0, timeout=30)
    pair.outbound.seal(key, SealInfo((1,)))  # with layers missing: a programming error of the role
    pair.aborted(key, Incomplete)
    pair.lost(ticket, Incomplete)
    eventually(lambda: pair.outbound.counters().get("aborted_incomplete") == 1)
