"""Faults of the world: processes crash, links are cut and frames are lost."""

from kv_transfer.core import outbound_handoff
from tests.unit.kv_transfer.model_checking.scenario import (
    EMPTY_SLAB,
    TORN_SLAB,
)
from tests.unit.kv_transfer.model_checking.world_actions import WorldActions


class WorldFaults(WorldActions):
    """Actions that each use up one fault of the scenario."""

    __slots__ = ()

    def do_crash_writer(self, writer: int) -> None:
        """A write in progress is torn, and the kernel drops the locks. Sent frames may arrive.

        A device goes on with the write, until `do_device_stops`."""
        self.faults += 1
        if not self.scenario.has_devices:
            self._tear_write(writer)
        self.dead_processes |= {f"writer {writer}"}
        self.locks = frozenset(lock for lock in self.locks if lock[1] != f"writer {writer}")
        self.frames_to_writer[writer] = ()
        self.machine_state_ids[f"outbound {writer}"], self.announced_steps[writer] = -1, 0

    def do_device_stops(self, writer: int) -> None:
        """The device of a crashed process has written its last: the end can be proven."""
        self._tear_write(writer)

    def _tear_write(self, writer: int) -> None:
        if (write := self.writes_in_flight[writer]) is not None and self.scenario.is_one_sided:
            self._write_tags(writer, write.slab_range, (TORN_SLAB,) * write.slab_range.num_slabs)
        self.writes_in_flight[writer] = None

    def do_crash_decode(self, _: int) -> None:
        """Decode's arena is gone, and its writers lose their links."""
        self.faults += 1
        self.dead_processes |= {"decode"}
        self.arena, self.times_landed = (
            (EMPTY_SLAB,) * len(self.arena),
            (0,) * len(self.times_landed),
        )
        self.owning_attempt, self.expired_attempts = None, frozenset()
        self.locks = frozenset(lock for lock in self.locks if lock[1] != "decode")
        for attempt in self.inbound:
            self.machine_state_ids[f"inbound {attempt}"] = -1
        for writer, machine in self.outbound.items():
            self.frames_to_decode[writer] = self.frames_to_writer[writer] = ()
            if machine.ticket is not None and machine.state not in outbound_handoff.TERMINAL_STATES:
                self.cut_links |= {writer}

    def do_cut_link(self, writer: int) -> None:
        """Frames on their way are lost, in both directions."""
        self.faults += 1
        self.frames_to_decode[writer] = self.frames_to_writer[writer] = ()
        self.cut_links |= {writer}

    def do_drop(self, writer: int) -> None:
        self.faults += 1
        self.frames_to_decode[writer] = self.frames_to_decode[writer][1:]
