"""The compute thread: the only one that touches block pool, sequences and engine. Its loop is the node."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton import log
from baton.clock import Clock
from baton.errors import BatonError
from baton.failpoints import FAILPOINTS
from node_engine.core.device_time import DeviceTime
from node_engine.core.messages import CacheQuery, Command, Joined, LedgerQuery
from node_engine.core.step import StepBatch
from node_engine.core.step_meter import StepTotals
from node_engine.host.inbox import Inbox
from node_engine.role import NodeParts, RolePolicy
from node_engine.sharing import Published


@dataclass(frozen=True, slots=True)
class Stop:
    """The last item of an inbox."""


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """Call back, once, on the compute thread, as soon as the node holds nothing for anybody."""

    call: Callable[[], None]


class ComputeThread:
    """Runs `receive, decide, compute, deliver` until told to stop. A step that raises fails its own attempts; an error
    anywhere else is a defect of ours, and the process ends at once so that nothing wrong can be served."""

    def __init__(self, parts: NodeParts, inbox: Inbox[Command | object], clock: Clock) -> None:
        self._parts = parts
        self._inbox = inbox
        self._clock = clock
        self._role: RolePolicy | None = None
        self.load = parts.scheduler.load()  # a snapshot for other threads, made anew in every turn of the loop
        self.steps = StepTotals()  # likewise
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._log = log.get("compute")
        self._device_time = DeviceTime()
        self.device_seconds: dict[str, float] = {}  # likewise a snapshot
        self._when_idle: list[Callable[[], None]] = []
        self._progress_at: float | None = None  # of a thread at work; None while it waits for something to do

    def start(self, role: RolePolicy) -> None:
        self._role = role
        self._thread.start()

    def stop(self) -> None:
        """Let the current step end and the thread with it."""
        self._inbox.put(Stop())
        self._thread.join()

    @property
    def progress_age(self) -> float:
        """Seconds since the thread last got anywhere; 0 while it has nothing to do. Read by any thread."""
        since = self._progress_at
        return 0.0 if since is None else self._clock() - since

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._log.error("compute thread failed", **log.describe_error(error))
            log.flush()
            os._exit(1)

    def _loop(self) -> None:
        assert self._role is not None
        idle = True
        while self._receive(wait=idle):
            self._tell_cache(resting=False)
            plan = self._parts.scheduler.next_step()
            if plan.outcomes:
                self._role.deliver(plan.outcomes)
            if plan.batch is not None:
                self._step(plan.batch)
            idle = plan.batch is None and not plan.outcomes
            if idle:
                self._tell_cache(resting=True)

    def _tell_cache(self, *, resting: bool) -> None:
        """Now and then while at work, and before a rest, so that nothing is left untold meanwhile."""
        journal, now = self._parts.pool.journal, self._clock()
        if resting or journal.is_due(now):
            self._parts.report.cache(journal.take(now))

    def _tell_whole_cache(self) -> None:
        pool = self._parts.pool
        self._parts.report.cache(pool.journal.take_snapshot(pool.full_blocks(), self._clock()))

    def _receive(self, *, wait: bool) -> bool:
        """Handle what has arrived; False once the thread is to end."""
        assert self._role is not None
        self.load = self._parts.scheduler.load()
        if wait:
            self._progress_at = None
            if self._when_idle and self._role.holding == 0:
                calls, self._when_idle = self._when_idle, []
                for call in calls:
                    call()
        items = self._inbox.drain(wait=wait)
        self._progress_at = self._clock()
        for item in items:
            match item:
                case Stop():
                    return False
                case WhenIdle(call):
                    self._when_idle.append(call)
                case LedgerQuery(query):
                    self._parts.report.ledger(query, self._parts.pool.ledger())
                case Published():
                    self._parts.sharing.published(item)
                case CacheQuery():
                    self._tell_whole_cache()
                case Joined():
                    self._role.handle(item)
                    self._parts.pool.journal.restart()
                    self._tell_whole_cache()
                case _:
                    self._role.handle(item)
        return True

    def _step(self, batch: StepBatch) -> None:
        assert self._role is not None
        started = self._clock()
        try:
            FAILPOINTS.hit("decode.step.before")
            on_layer = self._role.before_step(batch)
            computed = self._parts.engine.run(batch, on_layer)
            FAILPOINTS.hit("decode.step.after")
        except (BatonError, RuntimeError) as error:
            self._account(batch, self._clock() - started)
            self._log.error("step failed", **log.describe_error(error))
            self._role.step_failed(batch, error)
            return
        seconds = self._clock() - started
        self._account(batch, seconds)
        self.steps = self.steps.plus(batch, seconds)
        if batch.num_tokens > len(batch.slices):
            self._parts.sharing.worth.computed(batch.num_tokens, seconds)
        self._parts.scheduler.allowance.took(batch, seconds)
        outcomes = self._parts.scheduler.update(batch, computed)
        self._role.after_step(batch, outcomes, seconds)

    def _account(self, batch: StepBatch, seconds: float) -> None:
        self._device_time.add(batch, self._parts.scheduler.computing, seconds)
        self.device_seconds = self._device_time.counters()
