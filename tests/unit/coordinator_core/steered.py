"""Eight nodes as `Replay` has them, steered on a virtual clock: minutes of it cost a tenth of a second. It knows when
requests are late and how long nodes are away while they switch, and nothing of the brain; test_auto_simulated.py has
that. What is proved here is when it pays to follow a load."""

import math
from collections.abc import Sequence

from baton.fit import Fit
from baton.ratio import Split
from benchmarks.ratio_workloads import NODES, SLO, SLOTS, Offered, phases
from coordinator.core.cost_model import NodeCosts
from coordinator.core.forecast import Machine
from coordinator.core.replay import Replay
from coordinator.core.steering import Sight, Steering
from coordinator.core.workload import Asked, Stages, WorkloadMeter

# 2 ms for each prompt token; a step takes 40 ms, and 2 ms for each sequence: those of the paced nodes of `ratio`
MACHINE = Machine(NodeCosts(Fit((0.0, 2.048, 0.0)), Fit((0.04, 0.002, 0.0))), SLOTS, 65536, (0.01, 0.0))
SPLITS = [Split(prefill, NODES - prefill) for prefill in range(1, NODES)]
AWAY = {True: 7.0, False: 3.0}  # seconds until decode nodes, and until prefill nodes, have what they do behind them
_AFTER = 15.0

Phases = Sequence[tuple[Offered, float]]


class Steered:
    """`asked` and `missed` requests; `moves` and when they were. Without `automatic` the split stays."""

    def __init__(self, loads: Phases, split: Split, *, automatic: bool, seed: str = "steered") -> None:
        self.split = split
        self.moves: list[tuple[float, Split]] = []
        self.rows: list[tuple[float, int]] = []  # requests missed in all, at each look
        self._plan = phases(loads, seed)
        self.asked = len(self._plan)
        self._meter = WorkloadMeter()
        self._steering = Steering(SLO, 0.0)
        self._automatic = automatic
        self._nodes = Replay(split, MACHINE, SLO, 0.0)
        self._switching: list[tuple[float, Split]] = []
        self._told = self._came = 0
        self._run(sum(seconds for _, seconds in loads) + _AFTER)

    @property
    def missed(self) -> int:
        return self._nodes.missed

    @property
    def share(self) -> float:
        return 1.0 - self.missed / self.asked

    def late_after(self, moment: float) -> int:
        """Requests that were missed from then on."""
        return self.missed - next(missed for at, missed in reversed(self.rows) if at <= moment)

    def _run(self, end: float) -> None:
        coming = iter(self._plan)
        ask = next(coming, None)
        now = 0.0
        while now < end:
            arrival = ask.at if ask is not None else math.inf
            switch = self._switching[0][0] if self._switching else math.inf
            now = min(arrival, switch, self._steering.due)
            if now == switch:
                self._nodes.advance(now)
                self._nodes = self._nodes.onto(self._switching.pop(0)[1])
            elif ask is not None and now == arrival:
                one = Asked(ask.prompt_tokens, float(ask.output_tokens))
                self._nodes.ask(now, one, 1.0)
                self._meter.arrived(one.prompt, one.output, now)
                self._came += 1
                ask = next(coming, None)
            else:
                self._look(now)

    def _look(self, now: float) -> None:
        self._nodes.advance(now)
        late = self.missed - self._told
        for number in range(max(self._came, late)):
            self._meter.ended(math.inf if number < late else 0.1, 0.01, Stages(), now)
        self._told, self._came = self.missed, 0
        self.rows.append((now, self.missed))
        if not self._automatic:
            self._steering.rest("left alone", now)
            return
        waiting = [(one.arrived, Asked(int(500 * one.service), one.steps + 1)) for _, _, one in self._nodes._line]
        sight = Sight(self.split, len(self._switching), SPLITS, MACHINE, waiting)
        wanted = self._steering.look(sight, self._meter, now)
        if wanted is None:
            return
        self.moves.append((now, wanted))
        both = Split(min(self.split.prefill, wanted.prefill), min(self.split.decode, wanted.decode))
        there = now + AWAY[wanted.prefill > self.split.prefill]
        self._switching = [(now + 1e-3, both), (there, wanted)]
        self.split = wanted
