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
    prefill_seconds: float  # prefill and hand-off, from its start to its first token
    decode_steps: float
    resident_tokens: float  # in the cache, on average
    first_token_at: float | None = None  # when its prefill and hand-off ended
    is_late: bool = False


class SplitReplay:
    """The replay of one split; time only goes forward."""

    def __init__(self, split: RoleSplit, profile: NodeProfile, slo: Slo, now: float) -> None:
        self.missed_count = 0
        self.profile = profile  # updated as the cost model learns
        self._split = split
        self._max_ttft = math.inf if slo.ttft_seconds is None else slo.ttft_seconds
        self._max_tpot = math.inf if slo.tpot_seconds is None else slo.tpot_seconds
        self._now = now
        self._steps_done = 0.0  # decode steps so far
        self._serial = count()
        # heaps of (key, serial, request), by the time at which a prompt is due, the time at which
        # its prefill ends, and the number of steps after which its output ends
        self._queue: list[tuple[float, int, _ReplayedRequest]] = []
        self._prefilling: list[tuple[float, int, _ReplayedRequest]] = []
        self._decoding: list[tuple[float, int, _ReplayedRequest]] = []
        self._resident_tokens = 0.0  # in the caches of decode nodes
        # requests without a first token, in order of arrival
        self._awaiting_first_token: deque[_ReplayedRequest] = deque()

    def add_request(self, arrival: float, shape: RequestShape, computed: float) -> None:
        """Add a request at its arrival; `computed` is the share of its prompt that no cache has."""
        self.advance_to(arrival)
        new = round(shape.prompt_tokens * computed)
        fixed, seconds_per_token = self.profile.transfer_costs
        service = self.profile.node_costs.prefill_seconds(new, shape.prompt_tokens - new)
        request = _ReplayedRequest(
            arrival,
            service + fixed + seconds_per_token * shape.prompt_tokens,
            max(0.0, shape.output_tokens - 1.0),
            shape.prompt_tokens + shape.output_tokens / 2,
        )
        heapq.heappush(self._queue, (arrival + MAX_STRETCH * service, next(self._serial), request))
        self._awaiting_first_token.append(request)
        self._start_prefills()

    def advance_to(self, until: float) -> None:
        while True:
            step_seconds = self._step_seconds()
            answer = (
                self._now + max(0.0, self._decoding[0][0] - self._steps_done) * step_seconds
                if self._decoding
                else math.inf
            )
            prompt = self._prefilling[0][0] if self._prefilling else math.inf
            moment = min(answer, prompt)
            if moment > until:
                break
            self._advance_clock(moment, step_seconds)
            if answer <= prompt:
                self._finish_decode(heapq.heappop(self._decoding)[2])
            else:
                self._finish_prefill(heapq.heappop(self._prefilling)[2])
            self._start_prefills()
        self._advance_clock(until, step_seconds)

    def with_split(self, split: RoleSplit) -> "SplitReplay":
        """Return a copy that continues with another split; prompts whose node is gone restart."""
        copied = copy(self)
        copied._split, copied._serial = split, count(next(self._serial))
        own = {id(request): copy(request) for request in self._awaiting_first_token}
        own |= {id(request): copy(request) for _, _, request in self._decoding}
        for name in ("_queue", "_prefilling", "_decoding"):
            entries = [
                (arrival, number, own.setdefault(id(shape), copy(shape)))
                for arrival, number, shape in getattr(self, name)
            ]
            setattr(copied, name, entries)
        copied._awaiting_first_token = deque(
            own[id(request)] for request in self._awaiting_first_token
        )
        copied._prefilling.sort()
        while len(copied._prefilling) > split.prefill_nodes:
            _, number, request = copied._prefilling.pop()
            copied._resident_tokens -= request.resident_tokens
            heapq.heappush(copied._queue, (request.arrival, number, request))
        copied._start_prefills()
        return copied

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
        running = len(self._prefilling) + len(self._decoding)
        decode, profile = self._split.decode_nodes, self.profile
        return running < decode * profile.max_num_seqs and (
            not running
            or self._resident_tokens + request.resident_tokens <= decode * profile.cache_tokens
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

    def _advance_clock(self, moment: float, step_seconds: float) -> None:
        self._steps_done += (
            (moment - self._now) / step_seconds if self._decoding and step_seconds > 0.0 else 0.0
        )
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
