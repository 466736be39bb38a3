"""The two sides of the transfer plane, as the nodes call them, and the thread of each.

`KVSender` is prefill's side and `KVReceiver` is decode's. Their loops, `SenderLoop` and
`ReceiverLoop`, do the work on the plane's own thread: it waits for commands, messages and
deadlines, and sleeps otherwise.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from baton.errors import BatonError, HandoffFailed
from baton.kv.blocks import KVLayout
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.shared_memory.fence import ArenaFences
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket, TicketId
from kv_transfer.arena.slab_copier import SlabCopier
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.events import (
    InboundEvent,
    InboundLost,
    OutboundAborted,
    OutboundEvent,
    SealInfo,
)
from kv_transfer.core.handoff_common import CUDA_IPC, ArenaShape, is_one_sided
from kv_transfer.core.send_queue import ReadySlabs
from kv_transfer.device.arena_export import write_export
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.device.writer_process import name_writer, parse_writer
from kv_transfer.receiver_loop import ReceiverLoop
from kv_transfer.sender_loop import LayerWaiter, SenderLoop
from kv_transfer.transports.links import DecodeLink, EventFd, PeerLinks, Pollable, TransferDialer

_MAX_WAIT_SECONDS = 3600.0  # poll takes no infinite deadline


class PlaneLoop(Protocol):
    """What a PlaneThread drives. All methods run on its thread."""

    def poll_once(self) -> None:
        """Do everything that is due, without waiting."""
        ...

    def next_deadline(self) -> float:
        """When `poll_once` is due if nothing arrives, on the plane's clock. Now if work is left."""
        ...

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        """What wakes the thread when readable, and whether also when writable."""
        ...

    def begin_close(self) -> None:
        """End every open hand-off and tell the peers."""
        ...

    def is_drained(self) -> bool:
        """Whether every peer has acknowledged the ends that `begin_close` sent."""
        ...

    def close(self) -> None:
        """Close links and files. Called last."""
        ...


def exit_process() -> None:
    """End the process: without its transfer thread a node would fail all work that it is given.

    The supervisor starts it again."""
    log.flush_log()
    os._exit(1)


class PlaneThread:
    """Runs a PlaneLoop, and between its turns the posted commands in their order."""

    def __init__(
        self,
        name: str,
        loop: PlaneLoop,
        clock: Clock,
        close_timeout: float,
        on_internal_error: Callable[[], None],
    ) -> None:
        """`on_internal_error` is called when `loop` raises, which is a bug: the thread ends."""
        self._loop = loop
        self._clock = clock
        self._close_timeout = close_timeout
        self._on_internal_error = on_internal_error
        self._wakeup = EventFd()
        self._commands: deque[Callable[[], None]] = deque()
        self._registered: Sequence[tuple[Pollable, bool]] | None = None
        self._poller = zmq.Poller()
        self._is_stopping = False
        self._is_ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post_command(self, command: Callable[[], None]) -> bool:
        """Run a command on the thread. Call it from any thread; it never blocks.

        False when the thread has ended: the command will not run."""
        with self._lock:
            if self._is_ended:
                return False
            self._commands.append(command)
            os.eventfd_write(self._wakeup.fd, 1)  # this lock is enough: see `close`
        return True

    def close(self) -> None:
        """Run the commands posted so far, end all hand-offs and wait for the thread. Idempotent."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join()
        with self._lock:
            self._is_ended = True  # no command writes to a descriptor that is closed
        self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wait_and_poll(self._loop.next_deadline())
            self.run_posted_commands()
            self._drain()
            with self._lock:
                self._is_ended = True
            self.run_posted_commands()  # posted since
            self._loop.begin_close()
            self._loop.close()
        except Exception as error:
            log.get_logger("transfer").error(
                "transfer thread failed", **log.get_error_fields(error)
            )
            self._on_internal_error()

    def _drain(self) -> None:
        self._loop.begin_close()
        deadline = self._clock() + self._close_timeout
        while not self._loop.is_drained() and self._clock() < deadline:
            self._wait_and_poll(min(deadline, self._loop.next_deadline()))

    def _wait_and_poll(self, deadline: float) -> None:
        self._wait(min(deadline - self._clock(), _MAX_WAIT_SECONDS))
        self.run_posted_commands()
        self._loop.poll_once()

    def _wait(self, timeout: float) -> None:
        watched = self._loop.pollables()
        if watched != self._registered:
            # Making a poller costs more than a poll, and links seldom change.
            self._registered, self._poller = watched, zmq.Poller()
            self._poller.register(self._wakeup.fd, zmq.POLLIN)
            for pollable, also_writable in watched:
                self._poller.register(pollable, zmq.POLLIN | (zmq.POLLOUT if also_writable else 0))
        self._poller.poll(max(0, int(timeout * 1000 + 0.999)))
        self._wakeup.clear()

    def run_posted_commands(self) -> None:
        """Run the commands posted up to now. Call it on the thread itself."""
        while self._commands:
            self._commands.popleft()()


class KVSender:
    """Sends KV to decode nodes: prefill's OutboundPlane, safe to call from any thread."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        dialers: Mapping[str, TransferDialer],
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[OutboundEvent], None],
        clock: Clock = monotonic_clock,
        failpoints: Failpoints = FAILPOINTS,
        on_internal_error: Callable[[], None] = exit_process,
        device: DeviceMemory | None = None,
    ) -> None:
        """`dialers` by the scheme of the endpoints that they dial. The plane closes them.

        `device` is the memory that slabs are read from, if it is not `arena`."""
        copier = SlabCopier(arena, layout)
        self._num_blocks = copier.arena_slabs.num_blocks
        self._layout = layout
        self._emit = emit
        self._clock = clock
        self._loop = SenderLoop(
            copier=copier,
            layout=layout,
            links=PeerLinks(dialers),
            host_id=host_id,
            settings=settings,
            incarnation=incarnation,
            emit=emit,
            clock=clock,
            failpoints=failpoints,
            device=device,
        )
        self._device = device
        self._thread = PlaneThread(
            "transfer-outbound", self._loop, clock, settings.close_timeout, on_internal_error
        )
        self._loop.post_command = self._thread.post_command
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """What tells decode that a device writes; else empty, because a writer is not dialled."""
        return "" if self._device is None else name_writer(self._device.writer_name)

    @property
    def reads_device_memory(self) -> bool:
        return self._device is not None

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.rejoin(incarnation))

    def open_handoff(self, key: AttemptKey, num_tokens: int) -> None:
        blocks = self._layout.count_blocks(num_tokens)
        if not self._thread.post_command(lambda: self._loop.open_handoff(key, blocks)):
            self._emit(OutboundAborted(key, HandoffFailed("the transfer plane is closed")))

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self._thread.post_command(lambda: self._loop.set_ticket(key, ticket))

    def announce_layer(
        self, key: AttemptKey, layer: int, first: int, source: Sequence[BlockIndex]
    ) -> None:
        """Queue a computed layer to be sent. Raises ValueError for blocks that the arena lacks."""
        ready, now = ReadySlabs(layer, first, tuple(source)), self._clock()
        if (
            ready.source_blocks
            and not 0 <= min(ready.source_blocks) <= max(ready.source_blocks) < self._num_blocks
        ):
            raise ValueError(
                f"{key} announces blocks that an arena of {self._num_blocks} does not have"
            )
        self._thread.post_command(
            lambda: self._loop.apply_input(key, lambda machine: machine.announce_slabs(ready, now))
        )

    def seal_handoff(self, key: AttemptKey, info: SealInfo) -> None:
        self._thread.post_command(
            lambda: self._loop.apply_input(key, lambda machine: machine.seal(info, self._clock()))
        )

    def abort_handoff(self, key: AttemptKey, error: BatonError) -> None:
        self._thread.post_command(
            lambda: self._loop.apply_input(key, lambda machine: machine.abort(error))
        )

    def on_peer_gone(self, decode: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.on_peer_gone(decode))

    def wait_for_layer(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        waiter = LayerWaiter(layer)
        if not self._thread.post_command(lambda: self._loop.add_layer_waiter(key, waiter)):
            return False
        waiter.done.wait(timeout)
        return waiter.has_landed

    def counters(self) -> dict[str, float]:
        return dict(self._loop.counters)

    def close(self) -> None:
        self._thread.close()


class KVReceiver:
    """Receives KV from writers: decode's InboundPlane, safe to call from any thread."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        link: DecodeLink,
        fences: ArenaFences | None,
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[InboundEvent], None],
        clock: Clock = monotonic_clock,
        failpoints: Failpoints = FAILPOINTS,
        on_internal_error: Callable[[], None] = exit_process,
        device: DeviceMemory | None = None,
    ) -> None:
        """The plane closes `link` and `fences`.

        `fences` are the arena's, None if it is not a segment: then no writer may be one-sided.
        `device` is the memory in which the node computes, if peers may write to it."""
        self._device = device
        self._export = _export_device(device, fences)
        self._copier = SlabCopier(arena, layout)
        self._link = link
        self._fences = fences
        self._host_id = host_id
        self._settings = settings
        self._emit = emit
        self._loop = ReceiverLoop(
            copier=self._copier,
            shape=ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes),
            link=link,
            fences=fences,
            settings=settings,
            incarnation=incarnation,
            emit=emit,
            clock=clock,
            failpoints=failpoints,
            device=device,
        )
        self._thread = PlaneThread(
            "transfer-inbound", self._loop, clock, settings.close_timeout, on_internal_error
        )
        self._loop.post_command = self._thread.post_command
        self._loop.run_posted_commands = self._thread.run_posted_commands
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.rejoin(incarnation))

    def choose_transport(self, writer_host_id: str, writer_endpoint: str | None = None) -> str:
        setting = self._settings.transport
        if setting not in ("auto", CUDA_IPC) or (setting == CUDA_IPC and writer_endpoint is None):
            return setting
        is_same_host = writer_host_id == self._host_id and self._fences is not None
        staging = "shm" if is_same_host else "zmq"
        if writer_host_id in self._loop.unmappable_hosts:
            staging = "zmq"
        landings = self._loop.landings
        if landings is None:
            return staging
        writer = parse_writer(writer_endpoint or "")
        if not is_same_host:
            landings.say_excluded(writer_host_id, "it is on another host")
        elif not writer:
            landings.say_excluded(writer_host_id, "it does not compute in device memory")
        elif writer not in landings.unfit_writers:
            return CUDA_IPC
        return staging

    def allocate_fence_byte(self) -> int:
        return self._fences.allocate_byte() if self._fences is not None else 0

    def grant_ticket(self, ticket: Ticket) -> None:
        """Accept writes under `ticket`. Raises ValueError for blocks that the arena lacks."""
        two_sided = not is_one_sided(ticket.transport)
        by_device = ticket.transport == CUDA_IPC
        if (
            not self._copier.has_blocks_of(ticket)
            or not (two_sided or self._fences)
            or (by_device and self._device is None)
        ):
            raise ValueError(
                f"ticket {ticket.id} ({ticket.transport}) names blocks that are not in this arena"
            )
        steps = self._device.mark_queued_work() if by_device and self._device else None
        if not self._thread.post_command(lambda: self._loop.grant_ticket(ticket, steps)):
            self._emit(
                InboundLost(
                    ticket.id, HandoffFailed("the transfer plane is closed"), is_fenced=two_sided
                )
            )

    def commit_ticket(self, ticket: TicketId) -> None:
        self._thread.post_command(lambda: self._loop.commit_ticket(ticket))

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        """Withdraw a writer's permission to write KV blocks here, for the reason of `error`."""
        self._thread.post_command(lambda: self._loop.revoke_ticket(ticket, error))

    def on_peer_gone(self, writer: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.on_peer_gone(writer))

    def counters(self) -> dict[str, float]:
        return {**self._loop.counters, **self._link.counters()}

    def close(self) -> None:
        self._thread.close()
        if self._export is not None:
            self._export.unlink(missing_ok=True)


def _export_device(device: DeviceMemory | None, fences: ArenaFences | None) -> Path | None:
    """Let peers open the arena of the device. Raises UnmappableSegment."""
    if device is None:
        return None
    if fences is None:
        raise ValueError("device memory behind an arena that is not a segment")
    return write_export(fences.segment_path, device.export_arena())
