"""Replays the requests that arrived as another split would have served them.

It answers which of these requests the split would have missed, with their real times and lengths;
`backtest` keeps one replay for each split. How a split would serve a load that has not come yet is
answered by `split_forecast`.

Prompts wait in one queue, in the coordinator's placement order, for the prefill nodes. Outputs
share the decode nodes evenly: each step gives every one of them a token, so an output of n steps
ends when n more steps were made than at its start (virtual time; Demers, Keshav, Shenker: "Analysis
and Simulation of a Fair Queueing Algorithm", SIGCOMM 1989). It is not a forecast: a backlog that
grows is carried over, which a formula of queues in steady state cannot do.
"""

import heapq
import math
from collections import deque
from copy import copy
from dataclasses import dataclass
from itertools import count

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.admission.waiting_queue import MAX_STRETCH
from coordinator.core.estimates.workload import RequestShape
from coordinator.core.ratio.split_forecast import NodeProfile


@dataclass(slots=True)
class _ReplayedRequest:
    """One request in the replay."""

    arrival: float
    prefill_seconds: float  # from its start to its first token
    decode_steps: float
    resident_tokens: float  # in the cache, on average
    first_token_at: float | None = None  # its answer
    is_late: bool = False


class SplitReplay:
    """The replay of one split; time only goes forward."""

    def __init__(self, split: RoleSplit, machine: NodeProfile, slo: Slo, now: float) -> None:
        self.missed_count = 0
        self.profile = machine  # as it is known by now
        self._split = split
        self._max_ttft = math.inf if slo.ttft_seconds is None else slo.ttft_seconds
        self._max_tpot = math.inf if slo.tpot_seconds is None else slo.tpot_seconds
        self._now = now
        self._steps_done = 0.0  # steps, so far
        self._serial = count()
        self._queue: list[
            tuple[float, int, _ReplayedRequest]
        ] = []  # by the time at which it is due
        self._prefilling: list[
            tuple[float, int, _ReplayedRequest]
        ] = []  # that are computed, by their end
        self._decoding: list[
            tuple[float, int, _ReplayedRequest]
        ] = []  # by the steps made when they end
        self._resident_tokens = 0.0  # in the caches of decode nodes
        self._awaiting_first_token: deque[_ReplayedRequest] = (
            deque()
        )  # for their first token, as they came

    def add_request(self, at: float, one: RequestShape, computed: float) -> None:
        """Add a request at its arrival; `computed` is the share of its prompt that no cache has."""
        self.advance_to(at)
        new = round(one.prompt_tokens * computed)
        fixed, each_token = self.profile.transfer_costs
        service = self.profile.node_costs.prefill_seconds(new, one.prompt_tokens - new)
        request = _ReplayedRequest(
            at,
            service + fixed + each_token * one.prompt_tokens,
            max(0.0, one.output_tokens - 1.0),
            one.prompt_tokens + one.output_tokens / 2,
        )
        heapq.heappush(self._queue, (at + MAX_STRETCH * service, next(self._serial), request))
        self._awaiting_first_token.append(request)
        self._start_prefills()

    def advance_to(self, until: float) -> None:
        while True:
            pace = self._step_seconds()
            answer = (
                self._now + max(0.0, self._decoding[0][0] - self._steps_done) * pace
                if self._decoding
                else math.inf
            )
            prompt = self._prefilling[0][0] if self._prefilling else math.inf
            moment = min(answer, prompt)
            if moment > until:
                break
            self._advance_clock(moment, pace)
            if answer <= prompt:
                self._finish_decode(heapq.heappop(self._decoding)[2])
            else:
                self._finish_prefill(heapq.heappop(self._prefilling)[2])
            self._start_prefills()
        self._advance_clock(until, pace)

    def with_split(self, split: RoleSplit) -> "SplitReplay":
        """Return a copy that continues with another split; prompts whose node is gone restart."""
        made = copy(self)
        made._split, made._serial = split, count(next(self._serial))
        own = {id(request): copy(request) for request in self._awaiting_first_token}
        own |= {id(request): copy(request) for _, _, request in self._decoding}
        for name in ("_queue", "_prefilling", "_decoding"):
            entries = [
                (at, number, own.setdefault(id(one), copy(one)))
                for at, number, one in getattr(self, name)
            ]
            setattr(made, name, entries)
        made._awaiting_first_token = deque(
            own[id(request)] for request in self._awaiting_first_token
        )
        made._prefilling.sort()
        while len(made._prefilling) > split.prefill_nodes:
            _, number, request = made._prefilling.pop()
            made._resident_tokens -= request.resident_tokens
            heapq.heappush(made._queue, (request.arrival, number, request))
        made._start_prefills()
        return made

    def _start_prefills(self) -> None:
        while (
            self._queue
            and len(self._prefilling) < self._split.prefill_nodes
            and self._has_room(self._queue[0][2])
        ):
            _, number, request = heapq.heappop(self._queue)
            self._resident_tokens += request.resident_tokens
            heapq.heappush(self._prefilling, (self._now + request.prefill_seconds, number, request))

    def _has_room(self, request: _ReplayedRequest) -> bool:
        here = len(self._prefilling) + len(self._decoding)
        decode, machine = self._split.decode_nodes, self.profile
        return here < decode * machine.max_num_seqs and (
            not here
            or self._resident_tokens + request.resident_tokens <= decode * machine.cache_tokens
        )

    def _finish_prefill(self, request: _ReplayedRequest) -> None:
        request.first_token_at = self._now
        if request.decode_steps:
            heapq.heappush(
                self._decoding,
                (self._steps_done + request.decode_steps, next(self._serial), request),
            )
        else:
            self._resident_tokens -= request.resident_tokens

    def _finish_decode(self, request: _ReplayedRequest) -> None:
        self._resident_tokens -= request.resident_tokens
        began = self._now if request.first_token_at is None else request.first_token_at
        self.missed_count += (
            not request.is_late and (self._now - began) / request.decode_steps > self._max_tpot
        )

    def _step_seconds(self) -> float:
        """Return the seconds of a step, on evenly loaded nodes."""
        nodes = max(1, min(len(self._decoding), self._split.decode_nodes))
        return self.profile.node_costs.step_seconds(
            len(self._decoding) / nodes, self._resident_tokens / nodes
        )

    def _advance_clock(self, moment: float, pace: float) -> None:
        self._steps_done += (moment - self._now) / pace if self._decoding and pace > 0.0 else 0.0
        self._now = max(self._now, moment)
        while self._awaiting_first_token and (
            self._awaiting_first_token[0].first_token_at is not None
            or self._awaiting_first_token[0].arrival + self._max_ttft < moment
        ):
            request = self._awaiting_first_token.popleft()
            began = moment if request.first_token_at is None else request.first_token_at
            if began > request.arrival + self._max_ttft and not request.is_late:
                request.is_late = True
                self.missed_count += 1
