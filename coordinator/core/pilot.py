"""Advice on the ratio, and its automatic change: what was measured and learned, brought before those who decide."""

from dataclasses import dataclass

from baton.errors import InvalidRequest, Unavailable
from baton.ratio import Split
from baton.slo import Slo
from baton.types import Role
from coordinator.core.advisor import Advice, advise
from coordinator.core.forecast import Forecaster, Machine
from coordinator.core.record import RequestState
from coordinator.core.registry import Registry
from coordinator.core.requests import RequestTable
from coordinator.core.steering import ENOUGH, Sight, Steering
from coordinator.core.switches import Switches
from coordinator.core.workload import Asked, Service, Stages, Workload

BY_HAND = "manual: it changes when an operator says so"
WINDOW = 60.0  # seconds on which advice rests


@dataclass(frozen=True, slots=True)
class Report:
    """An advice with what it rests on. `waiting`: requests that nodes of a role have and have not begun."""

    advice: Advice
    workload: Workload
    service: Service
    stages: Stages
    waiting: dict[Role, int]


class Pilot:
    def __init__(self, registry: Registry, table: RequestTable, switches: Switches, slo: Slo) -> None:
        """`slo` counts while nobody asks for another."""
        self.moves = 0  # changes of the ratio so far
        self._registry = registry
        self._table = table
        self._knowledge = table.knowledge
        self._switches = switches
        self._default = slo
        self._steering: Steering | None = None
        self._patience = 0.0

    # what operators ask

    def advise(self, slo: Slo | None, now: float) -> Report:
        """Raises Unavailable as long as there is nothing to go by, InvalidRequest where there is no choice."""
        objective = slo or self.slo
        candidates, machine = self._candidates(now), self._machine()
        if not candidates or machine is None:
            raise InvalidRequest("there is no choice: prefill and decode nodes are needed, one of each at least")
        workload = self._knowledge.workload.over(WINDOW, now, self._unplaced())
        if workload is None or len(workload.requests) < ENOUGH:
            count = len(workload.requests) if workload else 0
            raise Unavailable(
                f"{count} requests came in the last {WINDOW:g} s: advice needs {ENOUGH} at least", retry_after=WINDOW
            )
        forecaster = Forecaster(workload, machine, objective)
        advice = advise(forecaster, candidates, self._switches.heading(now), objective)
        meter = self._knowledge.workload
        service, stages = meter.service(objective, WINDOW, now), meter.stages(WINDOW, now)
        return Report(advice, workload, service, stages, self._waiting())

    def auto(self, slo: Slo | None, patience: float, now: float) -> None:
        """Keep the objective from now on; nodes that are to switch have `patience` seconds for what they do."""
        self._steering = Steering(slo or self._default, now)
        self._patience = patience

    def manual(self) -> None:
        """Idempotent. Nodes that are on their way go on."""
        self._steering = None

    # time

    def due(self, now: float) -> Split | None:
        """The ratio that was set just now, if one was."""
        if self._steering is None or self._steering.due > now:
            return None
        machine = self._machine()
        if machine is None:
            self._steering.rest("no node is here", now)
            return None
        heading, moving = self._switches.heading(now), len(self._switches.flips)
        sight = Sight(heading, moving, self._candidates(now), machine, self._unplaced())
        wanted = self._steering.look(sight, self._knowledge.workload, now)
        if wanted is not None:
            self._switches.aim(wanted, self._patience, now)
            self.moves += 1
        return wanted

    def next(self) -> float | None:
        return self._steering.due if self._steering else None

    # views

    @property
    def automatic(self) -> bool:
        return self._steering is not None

    @property
    def slo(self) -> Slo:
        """What is kept, or would be."""
        return self._steering.slo if self._steering else self._default

    @property
    def reason(self) -> str:
        return self._steering.reason if self._steering else BY_HAND

    def service(self, now: float) -> Service:
        """Of the last minute."""
        return self._knowledge.workload.service(self.slo, WINDOW, now)

    # inside

    def _candidates(self, now: float) -> list[Split]:
        return [split for split in self._switches.possible(now) if split.prefill]

    def _machine(self) -> Machine | None:
        """The nodes as one kind, by what all of them have shown."""
        infos = [node.info for node in self._registry.nodes.values()]
        if not infos:
            return None
        costs, layout = self._knowledge.costs, infos[0].layout
        return Machine(
            costs.fleet,
            slots=min(info.max_num_seqs for info in infos),
            cache_tokens=min(info.num_blocks for info in infos) * layout.block_size,
            transfer=costs.any_link_line(layout.token_bytes),
        )

    def _unplaced(self) -> list[tuple[float, Asked]]:
        """Clients' requests that wait in the coordinator, and when they came."""
        waiting = [record for record in self._table.records.values() if record.state is RequestState.QUEUED]
        return [
            (record.marks.arrival, Asked(len(record.request.prompt), self._knowledge.output_of(record.request)))
            for record in waiting
            if not record.internal
        ]

    def _waiting(self) -> dict[Role, int]:
        found = dict.fromkeys(Role, 0)
        for node in self._registry.nodes.values():
            found[node.info.role] += node.stats.waiting if node.stats else 0
        return found
