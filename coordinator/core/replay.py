"""What a split of the nodes would have made of the requests that came: they are played through it once more.

Prompts wait in one line, in the order in which the coordinator places them, for as many prefill nodes as there are.
Answers share the decode nodes evenly: all get a token in the time of one step, so that an answer of n steps ends when n
steps more have been made than at its begin (the virtual time of Demers, Keshav, Shenker: "Analysis and Simulation of a
Fair Queueing Algorithm", SIGCOMM 1989). It is no forecast: lines that grow are carried over from one moment to the
next, which a formula of queues in their steady state does not know.
"""

import heapq
import math
from collections import deque
from copy import copy
from dataclasses import dataclass
from itertools import count

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.forecast import Machine
from coordinator.core.queue import STRETCH
from coordinator.core.workload import Asked


@dataclass(slots=True)
class _Request:
    """`service`: seconds until its first token once it is begun. `tokens`: in the cache, on average."""

    arrived: float
    service: float
    steps: float
    tokens: float
    begun: float | None = None  # its answer
    late: bool = False


class Replay:
    """Time goes forward. `missed`: requests that were not, or cannot be any more, within the objective."""

    def __init__(self, split: Split, machine: Machine, slo: Slo, now: float) -> None:
        self.missed = 0
        self.machine = machine  # as it is known by now
        self._split = split
        self._ttft = math.inf if slo.ttft is None else slo.ttft
        self._tpot = math.inf if slo.tpot is None else slo.tpot
        self._now = now
        self._made = 0.0  # steps, so far
        self._serial = count()
        self._line: list[tuple[float, int, _Request]] = []  # by the time at which it is due
        self._prompts: list[tuple[float, int, _Request]] = []  # that are computed, by their end
        self._answers: list[tuple[float, int, _Request]] = []  # by the steps made when they end
        self._tokens = 0.0  # in the caches of decode nodes
        self._waiting: deque[_Request] = deque()  # for their first token, as they came

    def ask(self, at: float, one: Asked, computed: float) -> None:
        """`computed`: the share of its prompt that no cache has."""
        self.advance(at)
        new = round(one.prompt * computed)
        fixed, each_token = self.machine.transfer
        service = self.machine.costs.prefill(new, one.prompt - new)
        request = _Request(
            at, service + fixed + each_token * one.prompt, max(0.0, one.output - 1.0), one.prompt + one.output / 2
        )
        heapq.heappush(self._line, (at + STRETCH * service, next(self._serial), request))
        self._waiting.append(request)
        self._begin()

    def advance(self, until: float) -> None:
        while True:
            pace = self._pace()
            answer = self._now + max(0.0, self._answers[0][0] - self._made) * pace if self._answers else math.inf
            prompt = self._prompts[0][0] if self._prompts else math.inf
            moment = min(answer, prompt)
            if moment > until:
                break
            self._pass(moment, pace)
            if answer <= prompt:
                self._answered(heapq.heappop(self._answers)[2])
            else:
                self._computed(heapq.heappop(self._prompts)[2])
            self._begin()
        self._pass(until, pace)

    def onto(self, split: Split) -> "Replay":
        """As if the nodes were split so from now on. Prompts whose node is gone are computed anew."""
        made = copy(self)
        made._split, made._serial = split, count(next(self._serial))
        own = {id(request): copy(request) for request in self._waiting}
        own |= {id(request): copy(request) for _, _, request in self._answers}
        for name in ("_line", "_prompts", "_answers"):
            entries = [(at, number, own.setdefault(id(one), copy(one))) for at, number, one in getattr(self, name)]
            setattr(made, name, entries)
        made._waiting = deque(own[id(request)] for request in self._waiting)
        made._prompts.sort()
        while len(made._prompts) > split.prefill:
            _, number, request = made._prompts.pop()
            made._tokens -= request.tokens
            heapq.heappush(made._line, (request.arrived, number, request))
        made._begin()
        return made

    def _begin(self) -> None:
        while self._line and len(self._prompts) < self._split.prefill and self._has_room(self._line[0][2]):
            _, number, request = heapq.heappop(self._line)
            self._tokens += request.tokens
            heapq.heappush(self._prompts, (self._now + request.service, number, request))

    def _has_room(self, request: _Request) -> bool:
        here = len(self._prompts) + len(self._answers)
        decode, machine = self._split.decode, self.machine
        return here < decode * machine.slots and (
            not here or self._tokens + request.tokens <= decode * machine.cache_tokens
        )

    def _computed(self, request: _Request) -> None:
        request.begun = self._now
        if request.steps:
            heapq.heappush(self._answers, (self._made + request.steps, next(self._serial), request))
        else:
            self._tokens -= request.tokens

    def _answered(self, request: _Request) -> None:
        self._tokens -= request.tokens
        began = self._now if request.begun is None else request.begun
        self.missed += not request.late and (self._now - began) / request.steps > self._tpot

    def _pace(self) -> float:
        """Seconds of a step, on nodes that all have as much."""
        nodes = max(1, min(len(self._answers), self._split.decode))
        return self.machine.costs.step(len(self._answers) / nodes, self._tokens / nodes)

    def _pass(self, moment: float, pace: float) -> None:
        self._made += (moment - self._now) / pace if self._answers and pace > 0.0 else 0.0
        self._now = max(self._now, moment)
        while self._waiting and (self._waiting[0].begun is not None or self._waiting[0].arrived + self._ttft < moment):
            request = self._waiting.popleft()
            began = moment if request.begun is None else request.begun
            if began > request.arrived + self._ttft and not request.late:
                request.late = True
                self.missed += 1
