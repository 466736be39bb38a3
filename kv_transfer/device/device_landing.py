"""What decode does with the frames of a ticket whose writer is a device.

Checksums are computed by decode's own device, and come later: a Seal waits for those of the Writes
before it. The first Credit waits until no step that decode has launched can write to the ticket's
blocks.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.errors import BatonError, HandoffFailed, IncompleteTransfer, UnmappableSegment
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FailpointAction, Failpoints
from baton.shared_memory.fence import ArenaFences
from baton.types import Ticket, TicketId
from kv_transfer.core import frames
from kv_transfer.core.handoff_common import NEVER
from kv_transfer.core.inbound_handoff import InboundHandoff, InboundOutput, InboundState
from kv_transfer.device.device_fence import DeviceTicketFence, WriterProofs
from kv_transfer.device.device_memory import DeviceFailed, QueuedWork, TransferDevice
from kv_transfer.device.writer_process import parse_writer

_MAX_WAITING_FRAMES = 4096  # of one ticket: a hand-off has fewer
_POLL_SECONDS = 0.001  # between two looks at the steps that a Credit waits for
_WRITABLE_STATES = frozenset({InboundState.GRANTED, InboundState.WRITING})

DeviceFrame = frames.OpenFrame | frames.WriteFrame | frames.SealFrame
ApplyOutputs = Callable[[InboundHandoff, list[InboundOutput]], None]


@dataclass(slots=True, eq=False)
class _WaitingFrame:
    frame: frames.WriteFrame | frames.SealFrame
    result: int | DeviceFailed | None = None  # the checksum of what a Write has written


@dataclass(slots=True, eq=False)
class DeviceLanding:
    """The state of one ticket, beside its machine."""

    machine: InboundHandoff
    fence: DeviceTicketFence
    queued_steps: QueuedWork  # what decode's device computed when the ticket was granted
    writer_name: str = ""
    held_answer: list[InboundOutput] = field(default_factory=list)  # waits for `queued_steps`
    waiting: deque[_WaitingFrame] = field(default_factory=deque)


class DeviceLandings:
    """Handles the frames of such tickets. Plane's thread only."""

    def __init__(
        self,
        device: TransferDevice,
        folder: Path,
        block_bytes: int,
        post: Callable[[Callable[[], None]], bool],
        apply_outputs: ApplyOutputs,
        count_landed: Callable[[frames.WriteFrame], None],
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        """`post` runs a call on the plane's thread."""
        # Writers that cannot use this transport; read by any thread.
        self.unfit_writers: set[str] = set()
        self._said: set[tuple[str, str]] = set()
        self._device = device
        self._proofs = WriterProofs(folder, device.driver_file)
        self._block_bytes = block_bytes
        self._post = post
        self._apply = apply_outputs
        self._count_landed = count_landed
        self._clock = clock
        self._failpoints = failpoints
        self._waiting_opens: dict[TicketId, DeviceLanding] = {}

    def make_landing(
        self, machine: InboundHandoff, fences: ArenaFences, queued_steps: QueuedWork
    ) -> DeviceLanding:
        """The state of a new ticket, whose machine is fenced by it from now on."""
        fence = DeviceTicketFence(fences, machine.ticket.fence_byte)
        machine.try_fence = fence.try_fence
        return DeviceLanding(machine, fence, queued_steps)

    @property
    def deadline(self) -> float:
        """When `poll` is due."""
        return self._clock() + _POLL_SECONDS if self._waiting_opens else NEVER

    def poll(self) -> None:
        """Send the Credits that waited for steps which have ended, and read what was checked."""
        for ticket, landing in list(self._waiting_opens.items()):
            if self._try_answer(landing):
                del self._waiting_opens[ticket]
        self._device.pass_on_ends(of_checks=True)

    def on_frame(
        self, landing: DeviceLanding, frame: DeviceFrame, payload: memoryview | None
    ) -> None:
        """Handle a frame of this attempt and of the present incarnations."""
        match frame:
            case frames.OpenFrame():
                self._on_open(landing, frame)
            case frames.WriteFrame():
                self._on_write(landing, frame, payload)
            case frames.SealFrame():
                self._enqueue(landing, _WaitingFrame(frame))
                self._process_waiting(landing)

    def exclude_writer(self, name: str, error: BatonError) -> None:
        """Use another transport for this writer from now on; said once."""
        if name:
            self.unfit_writers.add(name)
            self.say_excluded(name, error.message)

    def can_write(self, is_same_host: bool, endpoint: str) -> bool:
        """Whether the writer with this endpoint may write to this node's device. Any thread.

        If not, the reason is said once."""
        writer = parse_writer(endpoint)
        if not is_same_host:
            self.say_excluded(endpoint, "it is on another host")
        elif not writer:
            self.say_excluded(endpoint, "it does not compute in device memory")
        return is_same_host and bool(writer) and writer not in self.unfit_writers

    def say_excluded(self, writer: str, reason: str) -> None:
        """Say once why a writer does not write with its device. Any thread."""
        if (writer, reason) not in self._said:
            self._said.add((writer, reason))
            log.get_logger("transfer").warning(
                "KV of this writer does not travel by cuda_ipc", writer=writer, reason=reason
            )

    # Open

    def _on_open(self, landing: DeviceLanding, frame: frames.OpenFrame) -> None:
        machine = landing.machine
        landing.held_answer = machine.on_open(frame, self._clock())
        if machine.state in _WRITABLE_STATES:
            try:
                landing.fence.proof = self._proofs.get(frame.writer_process)
            except UnmappableSegment as error:
                self.exclude_writer(frame.writer_process, error)
                self._apply(machine, machine.revoke(error))
                return
            landing.writer_name = frame.writer_process
        if not self._try_answer(landing):
            self._waiting_opens[machine.ticket.id] = landing

    def _try_answer(self, landing: DeviceLanding) -> bool:
        """Answer the Open if no step of this node can write to the blocks any more."""
        machine = landing.machine
        try:
            if machine.state in _WRITABLE_STATES and not landing.queued_steps.has_ended():
                return False
        except DeviceFailed as error:
            self._apply(machine, machine.revoke(error))
            return True
        self._apply(machine, landing.held_answer)
        return True

    # Write

    def _on_write(
        self, landing: DeviceLanding, frame: frames.WriteFrame, payload: memoryview | None
    ) -> None:
        machine = landing.machine
        admitted, outputs = machine.check_write(frame, self._clock())
        self._apply(machine, outputs)
        if not admitted:
            return
        try:
            action = self._failpoints.hit("transfer.land.before")
            if action is FailpointAction.DROP:
                return
            waiting = _WaitingFrame(frame)
            if frame.is_inline or payload is not None:
                waiting.result = -1  # no checksum: nothing was written where it should be
            self._enqueue(landing, waiting)
            if waiting.result is None:
                self._start_check(landing, waiting, action)
        except HandoffFailed as error:
            self._apply(machine, machine.revoke(error))
            return
        if action is FailpointAction.DUPLICATE:
            self._on_write(landing, frame, payload)
        self._process_waiting(landing)

    def _start_check(
        self, landing: DeviceLanding, waiting: _WaitingFrame, action: FailpointAction | None
    ) -> None:
        """Let the device compute the checksum of what was written. Raises DeviceFailed."""
        assert isinstance(waiting.frame, frames.WriteFrame)
        slab_range = waiting.frame.slab_range
        blocks = _list_blocks(landing.machine.ticket, waiting.frame, self._block_bytes)

        def finish_check(result: int | DeviceFailed) -> None:
            waiting.result = result
            self._process_waiting(landing)

        def post_result(result: int | DeviceFailed) -> None:
            self._post(lambda: finish_check(result))

        corrupt = action is FailpointAction.CORRUPT
        self._device.check_slabs(slab_range, blocks, post_result, corrupt=corrupt)

    def _enqueue(self, landing: DeviceLanding, waiting: _WaitingFrame) -> None:
        if len(landing.waiting) >= _MAX_WAITING_FRAMES:
            error = IncompleteTransfer(
                f"more than {_MAX_WAITING_FRAMES} frames wait for their checksums"
            )
            self._apply(landing.machine, landing.machine.revoke(error))
            return
        landing.waiting.append(waiting)

    def _process_waiting(self, landing: DeviceLanding) -> None:
        """Process frames in their order, up to the first whose checksum is not known yet."""
        machine = landing.machine
        while landing.waiting:
            waiting = landing.waiting[0]
            if isinstance(waiting.frame, frames.WriteFrame) and waiting.result is None:
                return
            landing.waiting.popleft()
            if isinstance(waiting.frame, frames.SealFrame):
                self._apply(machine, machine.on_seal(waiting.frame, self._clock()))
            elif machine.state in _WRITABLE_STATES:
                self._apply(machine, self._finish_write(machine, waiting))

    def _finish_write(self, machine: InboundHandoff, waiting: _WaitingFrame) -> list[InboundOutput]:
        frame, now = waiting.frame, self._clock()
        assert isinstance(frame, frames.WriteFrame)
        if isinstance(waiting.result, DeviceFailed):
            return machine.revoke(waiting.result)
        admitted, outputs = machine.check_write(frame, now)  # another may have landed meanwhile
        if not admitted:
            return outputs
        is_right = waiting.result == frame.checksum
        outputs += machine.finish_write(frame, is_right, now)
        if is_right:
            self._count_landed(frame)
        try:
            self._failpoints.hit("transfer.land.after")
        except HandoffFailed as error:
            outputs += machine.revoke(error)
        return outputs

    def close(self) -> None:
        self._proofs.close()


def _list_blocks(ticket: Ticket, frame: frames.WriteFrame, block_bytes: int) -> list[int]:
    first = frame.first_block - ticket.first_block
    offsets = ticket.block_offsets[first : first + frame.num_blocks]
    return [offset // block_bytes for offset in offsets]
