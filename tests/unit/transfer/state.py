"""The state of the small world: the machines, decode's blocks, fence bytes, what is under way. Worlds are compared by
`key()` and copied by `clone()`; machines are shared between copies until they change."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Self

from kv_transfer.core import frames, landing
from kv_transfer.core.departure import Departure, DepartureState
from kv_transfer.core.landing import Landing, LandingState
from kv_transfer.core.ready import Outgoing
from kv_transfer.core.slabs import Rectangle
from tests.unit.transfer.setting import EMPTY, GHOST, Sent, Setting, Tag, Violation

Key = tuple[Any, ...]


_numbers: dict[Any, int] = {}


def number(value: Any) -> int:
    """A small number for a value, equal for equal values: states are compared by these."""
    return _numbers.setdefault(value, len(_numbers))


_SKIP = {"ticket", "shape", "fence", "lock", "grid", "error", "pace", "key", "writer", "host", "credit"}
landing_key = attrgetter(*(f.name for f in fields(Landing) if f.name not in _SKIP))
departure_key = attrgetter(*(f.name for f in fields(Departure) if f.name not in _SKIP))
_ALL_LANDING = tuple(f.name for f in fields(Landing))
_ALL_DEPARTURE = tuple(f.name for f in fields(Departure))


def _clone(machine: Any, names: tuple[str, ...]) -> Any:
    copy = object.__new__(type(machine))
    for name in names:
        setattr(copy, name, getattr(machine, name))
    return copy


@dataclass(slots=True)
class State:
    setting: Setting
    departures: dict[int, Departure] = field(default_factory=dict)  # by writer; shared between worlds: see `_departure`
    landings: dict[int, Landing] = field(default_factory=dict)  # by attempt; shared likewise
    numbers: dict[str, int] = field(default_factory=dict)  # of each machine's state
    announced: dict[int, int] = field(default_factory=dict)  # (chunk, layer) steps done by each writer
    up: dict[int, tuple[Sent, ...]] = field(default_factory=dict)
    down: dict[int, tuple[frames.Frame, ...]] = field(default_factory=dict)
    reading: dict[int, Outgoing | None] = field(default_factory=dict)
    locks: frozenset[tuple[int, str]] = frozenset()  # (fence byte, holder)
    arena: tuple[Tag, ...] = ()
    times_landed: tuple[int, ...] = ()
    owner: int | None = None  # attempt that holds the blocks
    in_use: bool = False  # ... since its commit
    late: frozenset[int] = frozenset()  # tickets whose lease has passed
    dead: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()  # departures and landings that told their end
    faults: int = 0
    endings: int = 0
    cut: frozenset[int] = frozenset()  # writers that have yet to notice that their link was lost

    # identity

    def key(self) -> Key:
        return (
            *self.numbers.values(),
            *self.announced.values(),
            *map(number, self.up.values()),
            *map(number, self.down.values()),
            *self.reading.values(),
            self.locks,
            number(self.arena),
            number(self.times_landed),
            self.owner,
            self.in_use,
            self.late,
            self.dead,
            self.ended,
            self.faults,
            self.endings,
            self.cut,
        )

    def clone(self) -> Self:
        return type(self)(
            self.setting,
            dict(self.departures),
            dict(self.landings),
            dict(self.numbers),
            dict(self.announced),
            dict(self.up),
            dict(self.down),
            dict(self.reading),
            self.locks,
            self.arena,
            self.times_landed,
            self.owner,
            self.in_use,
            self.late,
            self.dead,
            self.ended,
            self.faults,
            self.endings,
            self.cut,
        )

    def _departure(self, writer: int) -> Departure:
        """The machine, to be changed: a copy of this world's own."""
        machine: Departure = _clone(self.departures[writer], _ALL_DEPARTURE)
        self.departures[writer] = machine
        if isinstance(machine.lock, Lock):
            machine.lock = Lock(self, writer)
        return machine

    def _landing(self, attempt: int) -> Landing:
        machine: Landing = _clone(self.landings[attempt], _ALL_LANDING)
        self.landings[attempt] = machine
        machine.fence = self._fence(attempt)
        return machine

    # what is where

    def _fence(self, attempt: int) -> Callable[[], bool]:
        if not self.setting.one_sided:
            return lambda: True
        return lambda: self._take(attempt, "decode")

    def _take(self, byte: int, holder: str) -> bool:
        if any(held == byte and who != holder for held, who in self.locks):
            return False
        self.locks |= {(byte, holder)}
        return True

    def _steps(self) -> list[tuple[int, int, int]]:
        """(layer, first block, blocks) in the order in which a forward pass makes them final."""
        setting = self.setting
        total = setting.held + setting.blocks
        chunks, first = [], 0
        for size in setting.chunks or (total,):
            chunks.append((first, size))
            first += size
        return [(layer, first, size) for first, size in chunks for layer in range(setting.layers)]

    def _attempt(self, writer: int) -> int:
        return 0 if writer == GHOST else writer

    def _ticket_is_over(self, writer: int) -> bool:
        machine = self.landings.get(self._attempt(writer))
        return machine is not None and machine.state in landing.ENDED

    def _gone(self, writer: int) -> bool:
        return f"writer {writer}" in self.dead

    def _first_attempt_failed(self) -> bool:
        if "decode" in self.dead:
            return False
        lost = self.landings[0].state in (LandingState.LOST, LandingState.QUARANTINED)
        return lost or self.departures[0].state is DepartureState.ABORTED or self._gone(0)

    def _content(self, writer: int, area: Rectangle) -> tuple[Tag, ...]:
        return tuple(
            (writer, layer, block)
            for layer in range(area.layer, area.last_layer)
            for block in range(area.block, area.last_block)
        )

    def _places(self, area: Rectangle) -> list[int]:
        setting = self.setting
        return [
            layer * setting.blocks + block - setting.held
            for layer in range(area.layer, area.last_layer)
            for block in range(area.block, area.last_block)
        ]

    def _put(self, writer: int, area: Rectangle, content: tuple[Tag, ...]) -> None:
        """Bytes reach the arena. They may only reach blocks that are this writer's to write."""
        if "decode" in self.dead:
            return
        if self.owner != self._attempt(writer) or self.in_use:
            raise Violation(f"writer {writer} wrote blocks of {self.owner} (in use: {self.in_use})")
        arena = list(self.arena)
        for place, tag in zip(self._places(area), content, strict=True):
            arena[place] = tag
        self.arena = tuple(arena)

    def _check_contents(self, attempt: int) -> None:
        setting = self.setting
        wanted = self._content(attempt, Rectangle(0, setting.layers, setting.held, setting.blocks))
        if self.arena != wanted:
            raise Violation(f"ticket {attempt} is sealed over {self.arena}")

    def _release(self, attempt: int, fenced: bool) -> None:
        if self.owner != attempt or self.in_use:
            raise Violation(f"ticket {attempt} gave back blocks of {self.owner}")
        if fenced:
            self._end(f"landing {attempt}")
            self.owner = None
            self.arena = (EMPTY,) * len(self.arena)
            self.times_landed = (0,) * len(self.times_landed)

    def _end(self, what: str) -> None:
        if what in self.ended:
            raise Violation(f"{what} ended twice")
        self.ended |= {what}


class Lock:
    """A writer's byte of the fence file."""

    def __init__(self, world: State, writer: int) -> None:
        self._world = world
        self._writer = writer

    def take(self) -> bool:
        return self._world._take(self._world._attempt(self._writer), f"writer {self._writer}")

    def drop(self) -> None:
        world = self._world
        world.locks -= {(world._attempt(self._writer), f"writer {self._writer}")}


def checksum(content: tuple[Tag, ...]) -> int:
    return hash(content) & (2**63 - 1)
