"""The state of the small world: machines, decode's blocks, fence bytes, frames on their way.

Worlds are compared by `identity_key` and copied by `clone`. Copies share machines until one of them
changes a machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Self

from kv_transfer.core import frames, inbound_handoff
from kv_transfer.core.inbound_handoff import InboundHandoff, InboundState
from kv_transfer.core.outbound_handoff import OutboundHandoff, OutboundState
from kv_transfer.core.send_queue import OutgoingWrite
from kv_transfer.core.slabs import SlabRange
from tests.unit.kv_transfer.model_checking.scenario import (
    EMPTY_SLAB,
    GHOST_WRITER,
    FrameInFlight,
    InvariantViolation,
    Scenario,
    SlabTag,
)

Key = tuple[Any, ...]

_state_ids: dict[Any, int] = {}


def intern_state(value: Any) -> int:
    """A small number for a value, equal for equal values and quick to compare."""
    return _state_ids.setdefault(value, len(_state_ids))


# Fields that never change, or whose change always shows in another field.
_FIELDS_NOT_COMPARED = {
    "ticket",
    "shape",
    "try_fence",
    "lock",
    "grid",
    "error",
    "settings",
    "key",
    "writer_incarnation",
    "host_id",
    "credit_bytes",
}
inbound_state_key = attrgetter(
    *(f.name for f in fields(InboundHandoff) if f.name not in _FIELDS_NOT_COMPARED)
)
outbound_state_key = attrgetter(
    *(f.name for f in fields(OutboundHandoff) if f.name not in _FIELDS_NOT_COMPARED)
)
_ALL_INBOUND_FIELDS = tuple(f.name for f in fields(InboundHandoff))
_ALL_OUTBOUND_FIELDS = tuple(f.name for f in fields(OutboundHandoff))
assert {*_ALL_INBOUND_FIELDS, *_ALL_OUTBOUND_FIELDS} >= _FIELDS_NOT_COMPARED


def _clone(machine: Any, names: tuple[str, ...]) -> Any:
    copy = object.__new__(type(machine))
    for name in names:
        setattr(copy, name, getattr(machine, name))
    return copy


@dataclass(slots=True)
class WorldState:
    """Writers and attempts are known by their number; a ticket by that of its attempt."""

    scenario: Scenario
    # Machines by writer and by attempt, shared between worlds: see `_own_outbound`.
    outbound: dict[int, OutboundHandoff] = field(default_factory=dict)
    inbound: dict[int, InboundHandoff] = field(default_factory=dict)
    machine_state_ids: dict[str, int] = field(default_factory=dict)  # "outbound N", "inbound N"
    announced_steps: dict[int, int] = field(default_factory=dict)  # (chunk, layer) by writer
    frames_to_decode: dict[int, tuple[FrameInFlight, ...]] = field(default_factory=dict)
    frames_to_writer: dict[int, tuple[frames.FrameToWriter, ...]] = field(default_factory=dict)
    writes_in_flight: dict[int, OutgoingWrite | None] = field(default_factory=dict)
    locks: frozenset[tuple[int, str]] = frozenset()  # (fence byte, holder)
    arena: tuple[SlabTag, ...] = ()
    times_landed: tuple[int, ...] = ()
    owning_attempt: int | None = None  # attempt that holds the blocks
    is_committed: bool = False  # and has committed
    expired_attempts: frozenset[int] = frozenset()  # tickets whose lease has passed
    dead_processes: frozenset[str] = frozenset()
    ended_machines: frozenset[str] = frozenset()  # "outbound N", "inbound N"
    faults: int = 0
    endings: int = 0
    cut_links: frozenset[int] = frozenset()  # writers that have not noticed the loss yet

    # identity

    def identity_key(self) -> Key:
        """The state as a hashable value, equal for worlds in the same state."""
        return (
            *self.machine_state_ids.values(),
            *self.announced_steps.values(),
            *map(intern_state, self.frames_to_decode.values()),
            *map(intern_state, self.frames_to_writer.values()),
            *self.writes_in_flight.values(),
            self.locks,
            intern_state(self.arena),
            intern_state(self.times_landed),
            self.owning_attempt,
            self.is_committed,
            self.expired_attempts,
            self.dead_processes,
            self.ended_machines,
            self.faults,
            self.endings,
            self.cut_links,
        )

    def clone(self) -> Self:
        return type(self)(
            self.scenario,
            dict(self.outbound),
            dict(self.inbound),
            dict(self.machine_state_ids),
            dict(self.announced_steps),
            dict(self.frames_to_decode),
            dict(self.frames_to_writer),
            dict(self.writes_in_flight),
            self.locks,
            self.arena,
            self.times_landed,
            self.owning_attempt,
            self.is_committed,
            self.expired_attempts,
            self.dead_processes,
            self.ended_machines,
            self.faults,
            self.endings,
            self.cut_links,
        )

    def _own_outbound(self, writer: int) -> OutboundHandoff:
        """The machine, to be changed: a copy that only this world has."""
        machine: OutboundHandoff = _clone(self.outbound[writer], _ALL_OUTBOUND_FIELDS)
        self.outbound[writer] = machine
        if isinstance(machine.lock, ModelWriterLock):
            machine.lock = ModelWriterLock(self, writer)
        return machine

    def _own_inbound(self, attempt: int) -> InboundHandoff:
        machine: InboundHandoff = _clone(self.inbound[attempt], _ALL_INBOUND_FIELDS)
        self.inbound[attempt] = machine
        machine.try_fence = self._fence(attempt)
        return machine

    # queries and changes

    def _fence(self, attempt: int) -> Callable[[], bool]:
        if not self.scenario.is_one_sided:
            return lambda: True
        if not self.scenario.has_devices or self.scenario.fences_by_lock_alone:
            return lambda: self._try_lock_byte(attempt, "decode")
        return lambda: self._try_lock_byte(attempt, "decode") and not self._is_marked(attempt)

    def _is_marked(self, byte: int) -> bool:
        """Whether a writer under this byte has writes in flight: it has marked the byte."""
        return any(
            write is not None and self._attempt(writer) == byte
            for writer, write in self.writes_in_flight.items()
        )

    def _try_lock_byte(self, byte: int, owner: str) -> bool:
        if any(locked == byte and other != owner for locked, other in self.locks):
            return False
        self.locks |= {(byte, owner)}
        return True

    def _announce_steps(self) -> list[tuple[int, int, int]]:
        """(layer, first block, blocks) in the order in which a forward pass makes them final."""
        scenario = self.scenario
        total = scenario.blocks_held_by_decode + scenario.num_blocks
        chunks, first = [], 0
        for size in scenario.blocks_per_chunk or (total,):
            chunks.append((first, size))
            first += size
        return [
            (layer, first, size) for first, size in chunks for layer in range(scenario.num_layers)
        ]

    def _attempt(self, writer: int) -> int:
        return 0 if writer == GHOST_WRITER else writer

    def _ticket_is_over(self, writer: int) -> bool:
        machine = self.inbound.get(self._attempt(writer))
        return machine is not None and machine.state in inbound_handoff.TERMINAL_STATES

    def _is_dead(self, writer: int) -> bool:
        return f"writer {writer}" in self.dead_processes

    def _first_attempt_failed(self) -> bool:
        if "decode" in self.dead_processes:
            return False
        lost = self.inbound[0].state in (InboundState.LOST, InboundState.QUARANTINED)
        return lost or self.outbound[0].state is OutboundState.ABORTED or self._is_dead(0)

    def _expected_tags(self, writer: int, slab_range: SlabRange) -> tuple[SlabTag, ...]:
        return tuple(
            (writer, layer, block)
            for layer in range(slab_range.first_layer, slab_range.end_layer)
            for block in range(slab_range.first_block, slab_range.end_block)
        )

    def _arena_positions(self, slab_range: SlabRange) -> list[int]:
        scenario = self.scenario
        return [
            layer * scenario.num_blocks + block - scenario.blocks_held_by_decode
            for layer in range(slab_range.first_layer, slab_range.end_layer)
            for block in range(slab_range.first_block, slab_range.end_block)
        ]

    def _write_tags(self, writer: int, slab_range: SlabRange, content: tuple[SlabTag, ...]) -> None:
        """Bytes reach the arena, which must be in blocks that this writer may write."""
        if "decode" in self.dead_processes:
            return
        if self.owning_attempt != self._attempt(writer) or self.is_committed:
            raise InvariantViolation(
                f"writer {writer} wrote blocks of {self.owning_attempt} "
                f"(in use: {self.is_committed})"
            )
        arena = list(self.arena)
        for place, tag in zip(self._arena_positions(slab_range), content, strict=True):
            arena[place] = tag
        self.arena = tuple(arena)

    def _check_arena_contents(self, attempt: int) -> None:
        scenario = self.scenario
        expected = self._expected_tags(
            attempt,
            SlabRange(0, scenario.num_layers, scenario.blocks_held_by_decode, scenario.num_blocks),
        )
        if self.arena != expected:
            raise InvariantViolation(f"ticket {attempt} is sealed over {self.arena}")

    def _release_blocks(self, attempt: int, is_fenced: bool) -> None:
        if self.owning_attempt != attempt or self.is_committed:
            raise InvariantViolation(f"ticket {attempt} gave back blocks of {self.owning_attempt}")
        if is_fenced:
            self._mark_ended(f"inbound {attempt}")
            self.owning_attempt = None
            self.arena = (EMPTY_SLAB,) * len(self.arena)
            self.times_landed = (0,) * len(self.times_landed)

    def _mark_ended(self, machine: str) -> None:
        if machine in self.ended_machines:
            raise InvariantViolation(f"{machine} ended twice")
        self.ended_machines |= {machine}


class ModelWriterLock:
    """A writer's lock on its byte of the fence file."""

    def __init__(self, world: WorldState, writer: int) -> None:
        self._world = world
        self._writer = writer

    def try_acquire(self) -> bool:
        return self._world._try_lock_byte(
            self._world._attempt(self._writer), f"writer {self._writer}"
        )

    def release(self) -> None:
        world = self._world
        world.locks -= {(world._attempt(self._writer), f"writer {self._writer}")}


def checksum(content: tuple[SlabTag, ...]) -> int:
    return hash(content) & (2**63 - 1)
