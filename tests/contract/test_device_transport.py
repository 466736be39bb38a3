"""What only cuda_ipc does: the first Credit, checksums that come later, failures of a device.

Device memory is the host's here.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.errors import Cancelled, PeerUnreachable, UnmappableSegment
from baton.kv.device_event import DeviceEvent
from kv_transfer.core.slabs import SlabRange
from kv_transfer.device.device_memory import DeviceFailed, OnChecksum
from kv_transfer.device.host_memory import HostMemory, HostPeerMemory
from kv_transfer.plane import (
    InboundFenced,
    InboundLost,
    InboundSealed,
    OutboundAborted,
    OutboundCommitted,
)
from tests.contract.raw_writer import RawWriter
from tests.contract.transfer_pair import (
    FAST_SETTINGS,
    TransferPair,
    transfer_pair,
    wait_until,
)

BLOCKS = [3, 4]


@contextmanager
def device_pair(folder: Path, **settings: str) -> Iterator[TransferPair]:
    with transfer_pair("cuda_ipc", folder, **settings) as pair:  # type: ignore[arg-type]
        yield pair


class RunningSteps:
    """Steps of decode that run until the test ends them; a QueuedWork."""

    def __init__(self) -> None:
        self.ended = False
        self.asked = 0
        self.blocks: list[int] = []  # that are granted

    def note_blocks(self, blocks: Sequence[int]) -> "RunningSteps":
        self.blocks += blocks
        return self

    def has_ended(self) -> bool:
        self.asked += 1
        return self.ended


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> RunningSteps:
    found = RunningSteps()
    monkeypatch.setattr(HostMemory, "mark_queued_work", lambda _, blocks: found.note_blocks(blocks))
    return found


def test_nothing_is_written_before_decodes_own_steps_have_left_the_blocks(
    steps: RunningSteps, tmp_path: Path
) -> None:
    with device_pair(tmp_path) as pair:
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        wait_until(lambda: steps.asked > 3)
        assert steps.blocks == BLOCKS
        assert pair.is_untouched(BLOCKS)
        assert pair.outbound.counters().get("messages_written", 0) == 0
        steps.ended = True
        assert pair.finish_handoff(ticket).key == key
        assert pair.has_arrived([1, 2], BLOCKS)


def test_a_ticket_that_is_revoked_before_its_credit_is_refused(
    steps: RunningSteps, tmp_path: Path
) -> None:
    with device_pair(tmp_path) as pair:
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        wait_until(lambda: steps.asked > 1)
        pair.inbound.revoke_ticket(ticket.id, Cancelled("the client left"))
        pair.expect_lost(ticket, Cancelled)
        pair.expect_aborted(key, Cancelled)
        steps.ended = True
        pair.check_full_handoff()
        assert pair.is_untouched(BLOCKS)


def test_a_writer_without_a_proof_is_refused_and_not_asked_again(tmp_path: Path) -> None:
    with device_pair(tmp_path) as pair:
        same_host = pair.inbound._host_id  # type: ignore[attr-defined]
        assert pair.inbound.choose_transport(same_host, pair.outbound.endpoint) == "cuda_ipc"
        assert pair.inbound.choose_transport("elsewhere", pair.outbound.endpoint) == "zmq"
        assert pair.inbound.choose_transport(same_host, "") == "shm"
        ticket = pair.grant_ticket(pair.new_key(), BLOCKS)
        pair.writer_name = "baton-writer-" + "0" * 32 + ".process"
        with RawWriter(pair, ticket) as writer:
            writer.send_open_frame()
            pair.expect_lost(ticket, UnmappableSegment)
            writer.expect_refused("unmappable")
        stranger = f"device://{pair.writer_name}"
        assert pair.inbound.choose_transport(same_host, stranger) == "shm"
        assert pair.inbound.choose_transport(same_host, pair.outbound.endpoint) == "cuda_ipc"


def test_a_peer_that_cannot_open_the_memory_uses_another_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "can_open", lambda *_: False)
    with device_pair(tmp_path) as pair:
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        pair.expect_lost(ticket, UnmappableSegment)
        pair.expect_aborted(key, UnmappableSegment)
        same_host = pair.inbound._host_id  # type: ignore[attr-defined]
        assert pair.inbound.choose_transport(same_host, pair.outbound.endpoint) == "shm"
        pair.backend = "shm"
        pair.check_full_handoff()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_slabs_of_device_memory_travel_over_other_transports(
    transport: str, tmp_path: Path
) -> None:
    """The device copies them to host memory first."""
    with device_pair(tmp_path) as pair:
        pair.backend = transport
        pair.check_full_handoff()


def test_a_device_that_fails_in_a_write_keeps_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(
        self: HostPeerMemory,
        slab_range: SlabRange,
        source: Sequence[int],
        target: Sequence[int],
        on_done: OnChecksum,
        *,
        after: DeviceEvent | None = None,
        corrupt: bool = False,
    ) -> None:
        self._owner.stream.put(lambda: on_done(DeviceFailed("an illegal access")))

    with device_pair(tmp_path) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(HostPeerMemory, "write_slabs", fail)
            key, ticket = pair.start_handoff([1, 2], BLOCKS)
            aborted = pair.prefill_events.expect_event(OutboundAborted)
            assert (aborted.key, type(aborted.error)) == (key, DeviceFailed)
            lost = pair.decode_events.expect_event(InboundLost)
            assert (lost.ticket_id, lost.is_fenced) == (ticket.id, False)
        pair.check_full_handoff()  # in other blocks
        retries = pair.inbound.counters().get("fence_retries", 0)
        wait_until(lambda: pair.inbound.counters().get("fence_retries", 0) >= retries + 3)
        assert pair.decode_events.drain_unexpected() == []


def test_a_device_that_fails_to_check_loses_the_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HostMemory, *arguments: object, corrupt: bool) -> None:
        raise DeviceFailed("an illegal access")

    with device_pair(tmp_path) as pair:
        monkeypatch.setattr(HostMemory, "check_slabs", fail)
        key, ticket = pair.start_handoff([1, 2], BLOCKS)
        pair.expect_lost_and_fenced(ticket, DeviceFailed)
        assert pair.prefill_events.expect_event(OutboundAborted).key == key


def test_a_seal_waits_for_the_checksums_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[SlabRange, Sequence[int], OnChecksum]] = []
    check = HostMemory.check_slabs
    with device_pair(tmp_path) as pair:
        monkeypatch.setattr(
            HostMemory, "check_slabs", lambda self, *arguments, corrupt: held.append(arguments)
        )
        ticket = pair.grant_ticket(pair.new_key(), BLOCKS)
        with RawWriter(pair, ticket) as writer:
            writer.send_open()
            writer.write_in_place(SlabRange(0, 3, 0, 2))
            frame, _ = writer.make_write_frame(SlabRange(0, 3, 0, 2))
            writer.send_write(SlabRange(0, 3, 0, 2))
            writer.send(frame)  # twice
            writer.send_seal()
            wait_until(lambda: len(held) == 2)
            device = pair.inbound._device  # type: ignore[attr-defined]
            for arguments in held:
                check(device, *arguments)
            assert pair.decode_events.expect_event(InboundSealed).ticket_id == ticket.id
            assert pair.inbound.counters()["ignored_duplicate"] == 1
            pair.inbound.commit_ticket(ticket.id)


def test_messages_of_a_device_are_larger(tmp_path: Path) -> None:
    """A whole hand-off in one message, although other transports would need many."""
    with transfer_pair("cuda_ipc", tmp_path, settings=FAST_SETTINGS) as pair:
        source = list(range(16))
        key, ticket = pair.start_handoff(source, [31 - block for block in source])
        assert pair.finish_handoff(ticket).key == key
        assert pair.outbound.counters()["messages_written"] <= pair.layout.num_layers
        assert pair.prefill_events.drain_unexpected() == []
        assert OutboundCommitted is not None


def test_decode_that_is_lost_during_a_write_ends_one_hand_off_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arena is unmapped, and its fence file closed, once the write has ended."""
    held: list[OnChecksum] = []
    with device_pair(tmp_path) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(
                HostPeerMemory,
                "write_slabs",
                lambda self, slabs, source, target, on_done, **_: held.append(on_done),
            )
            key, ticket = pair.start_handoff([1, 2], BLOCKS)
            wait_until(lambda: len(held) > 0)
            pair.outbound.on_peer_gone(pair.decode_address.incarnation)
            pair.inbound.revoke_ticket(ticket.id, Cancelled("the node leaves"))
            lost = pair.decode_events.expect_event(InboundLost)
            assert (lost.ticket_id, lost.is_fenced) == (ticket.id, False)
            for on_done in held:
                on_done(1)
            pair.expect_aborted(key, PeerUnreachable)
            assert pair.decode_events.expect_event(InboundFenced).ticket_id == ticket.id
        pair.check_full_handoff()


def test_decode_that_is_lost_while_slabs_are_staged_has_a_fence_until_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device copies them to host memory, and then they are copied to decode's segment."""
    held: list[Callable[[], None]] = []
    read = HostMemory.read_slabs
    with device_pair(tmp_path) as pair:
        pair.backend = "shm"
        with monkeypatch.context() as patch:
            patch.setattr(
                HostMemory,
                "read_slabs",
                lambda *arguments, **keywords: held.append(lambda: read(*arguments, **keywords)),
            )
            key, ticket = pair.start_handoff([1, 2], BLOCKS)
            wait_until(lambda: len(held) > 0)
            pair.outbound.on_peer_gone(pair.decode_address.incarnation)
            other = pair.open_handoff(1)
            pair.outbound.abort_handoff(other, Cancelled("ends when the loss was handled"))
            pair.expect_aborted(other, Cancelled)
            pair.inbound.revoke_ticket(ticket.id, Cancelled("the node leaves"))
            lost = pair.decode_events.expect_event(InboundLost)
            assert (lost.ticket_id, lost.is_fenced) == (ticket.id, False)
            while held:
                held.pop()()
            pair.expect_aborted(key, PeerUnreachable)
            assert pair.decode_events.expect_event(InboundFenced).ticket_id == ticket.id
        pair.check_full_handoff()


def test_each_plane_passes_on_the_ends_of_its_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has changed its role has both planes on one device."""
    seen: set[tuple[str, bool]] = set()

    def record(self: HostMemory, *, of_checks: bool) -> None:
        seen.add((threading.current_thread().name, of_checks))

    monkeypatch.setattr(HostMemory, "pass_on_ends", record)
    with device_pair(tmp_path) as pair:
        pair.check_full_handoff()
    assert seen == {("transfer-outbound", False), ("transfer-inbound", True)}
