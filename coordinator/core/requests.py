"""Every request that has not ended, and what can happen to it.

Three rules hold whatever arrives: a request ends in `end` and nowhere else; what failed goes on in `replace` and
nowhere else; a leg that was placed is closed in `close_leg` and nowhere else (or falls with its node in `lose_node`).
"""

from baton.errors import BatonError, Cancelled, Drained, NodeGone, Preempted, Stalled, Unavailable
from baton.types import AttemptKey, FinishReason, Incarnation, NodeName, Request, RequestId, Role, TokenScore
from coordinator.core.admission import Admission
from coordinator.core.breakers import Breakers, Pair
from coordinator.core.capacity import Capacity, TooLongToPlace
from coordinator.core.counters import Counters
from coordinator.core.counting import count_sources
from coordinator.core.decisions import Decisions
from coordinator.core.degradation import Degradation
from coordinator.core.endings import Endings
from coordinator.core.followers import Followers
from coordinator.core.knowledge import Knowledge
from coordinator.core.loads import Loads
from coordinator.core.messages import (
    Admit,
    Cancel,
    Effect,
    Emit,
    EmitPromptScores,
    GiveTicket,
    PairChanged,
    Prefill,
    Replaced,
    Send,
    Submit,
)
from coordinator.core.notes import REFUSED, SERVED, begin
from coordinator.core.placement import Placement
from coordinator.core.prediction import Decision
from coordinator.core.prospects import Prospects
from coordinator.core.queue import WaitingQueue
from coordinator.core.record import Attempt, Record, RequestState
from coordinator.core.registry import Registry
from coordinator.core.retries import Retries
from coordinator.core.retry_budget import RetryBudget
from coordinator.core.settings import Settings, rest_after
from coordinator.core.timeline import Marks
from coordinator.core.timers import Timers

UNSERVED_PATIENCE = 1.0  # seconds a new request waits for nodes that could serve it


class RequestTable:
    """Effects collect in `out`; the brain hands them to its shell after every input."""

    def __init__(self, registry: Registry, placement: Placement, settings: Settings) -> None:
        self.records: dict[RequestId, Record] = {}
        self.queue = WaitingQueue()
        self.loads = Loads()
        self.timers = Timers()
        self.counters = Counters()
        self.out: list[Effect] = []
        self.probed: list[tuple[RequestId, FinishReason | BatonError]] = []  # probes that have ended
        self.last_progress = 0.0  # when a request got further than it had been, or the first of those here came
        self.placeable = False  # something has changed since placement was last tried
        self.knowledge = Knowledge(registry)
        self.capacity = Capacity(registry, hands_off=settings.mode != "colocated")
        self.too_long = TooLongToPlace(self.records, self.queue, self.capacity, settings.queue_limits)
        self.endings = Endings(self.counters, self.knowledge.workload, settings.explain_keep)
        self.prospects = Prospects(registry, self.loads, self.knowledge.costs, self.knowledge.answers)
        self.degradation = Degradation()
        self.admission = Admission(self.queue, settings.queue_limits, self.prospects, self.degradation)
        self.breakers = Breakers()
        budget = RetryBudget(settings.retry_share)
        self.retries = Retries(self.records, self.queue, self.timers, budget, settings.max_queue)
        self.decisions = Decisions(
            registry,
            self.loads,
            placement,
            self.knowledge,
            self.admission,
            self.prospects,
            self.breakers,
            self.degradation,
            settings.mode,
            settings.prefill_share,
        )
        self._registry = registry
        self._settings = settings
        self._followers = Followers(self.records, self.queue)
        self._unadmitted: set[RequestId] = set()

    def next_due(self) -> tuple[float | None, ...]:
        """When something here is to be looked at again."""
        degradation = self.degradation.next(waiting=len(self.queue) > 0)
        return self.timers.next(), self.breakers.next(), self.retries.next(), degradation

    def add(self, request: Request, now: float, *, internal: bool, after: RequestId | None = None) -> Record:
        record = Record(request, now + request.timeout, Marks(now), internal, model=self._registry.model_digest)
        if len(request.prompt) == 1:
            record.prompt_scores = ()
        if not self.records:
            self.last_progress = now
        self.records[request.id] = record
        self.retries.budget.offered(now)
        self.queue.push(request.id, self.admission.let_in(request, now))
        if not internal:
            self.knowledge.workload.arrived(len(request.prompt), self.knowledge.output_of(request), now)
        leader = self.records.get(after) if after is not None else None
        if leader is not None:
            self._followers.add(record, leader)
        record.admit_by = now + UNSERVED_PATIENCE
        self._unadmitted.add(request.id)
        self.timers.set(request.id, record.next_due())
        self.placeable = True
        return record

    def add_probe(self, request: Request, node: Incarnation, now: float) -> None:
        """A request of our own that goes through `node`, which need not be in service, and through nodes of the other
        role that are: at once, once, and before all others. How it ends is in `probed`."""
        record = Record(request, now + request.timeout, Marks(now), internal=True, prompt_scores=(), pin=node)
        record.model = self._registry.model_digest
        if not self.records:
            self.last_progress = now
        self.records[request.id] = record
        self.queue.push_front(request.id)
        self.timers.set(request.id, record.next_due())
        self.placeable = True

    def current(self, key: AttemptKey, sender: Incarnation) -> tuple[Record, Attempt] | None:
        """The request whose present attempt is `key`, if `sender` still works on it; else the message is dropped."""
        found = self.present(key)
        if found is None or sender not in found[1].legs:
            self.counters.dropped_messages["stale"] += 1
            return None
        return found

    def present(self, key: AttemptKey) -> tuple[Record, Attempt] | None:
        """The request whose present attempt is `key`, whoever still works on it."""
        record = self.records.get(key.request)
        attempt = record.attempt if record else None
        return (record, attempt) if record and attempt and attempt.key == key else None

    def name(self, node: Incarnation | None) -> NodeName:
        found = self._registry.nodes.get(node) if node else None
        return found.info.name if found else NodeName("")

    # placing

    def place_waiting(self, now: float) -> None:
        """Admit and place what can be, if anything has changed."""
        self.placeable |= self.retries.let_go(now)
        if not self.placeable:
            return
        self.placeable = False
        self.too_long.release()
        if self._unadmitted and not self.missing():
            self._admit_all()
        while self.queue and self._place_one(now):
            pass

    def _admit_all(self) -> None:
        for record in [record for request, record in self.records.items() if request in self._unadmitted]:
            if not self.capacity.why_too_long(record):
                self._admit(record)

    def _admit(self, record: Record) -> None:
        request = record.request.id
        self._unadmitted.remove(request)
        record.admit_by = None
        self.timers.set(request, record.next_due())
        self.out.append(Admit(request))

    def _place_one(self, now: float) -> bool:
        views = self.decisions.views(now)
        full, passed_over = self.prospects.decode_full(), set[tuple[int, str]]()  # by class and tenant
        smallest = min((view.context for view in views), default=0)
        for request in self.queue.candidates() if self._registry.nodes else ():
            record = self.records[request]
            if (late := self.decisions.too_late(record, now, wanted=len(self.queue) > 1)) is not None:
                self.end(record, late, now)
                return True
            if record.length > smallest and record.pin is None and self.capacity.why_too_long(record):
                if (error := self.too_long.hold(record)) is not None:
                    self.end(record, error, now)
                return True
            if full and record.remaining > 1 and record.pin is None:
                continue  # as it is most of the time under load
            standing, headroom = record.request.standing, self.admission.headroom(request, now)
            flow = standing.level, standing.tenant
            if headroom and flow in passed_over:
                continue  # its next would not be placed either
            decision = self.decisions.decide(record, views, now, headroom)
            if decision is not None:
                yielding = [tenant for level, tenant in passed_over if level == standing.level]
                self.queue.take(request, now, yielding)
                self._place(record, decision, now)
                return True
            if headroom:
                passed_over.add(flow)
        return False

    def _place(self, record: Record, decision: Decision, now: float) -> None:
        if record.request.id in self._unadmitted:  # one token alone: prefill can serve it while there is no decode node
            self._admit(record)
        record.attempts += 1
        request, prefill, decode = record.request, decision.choice.prefill, decision.choice.decode
        key = AttemptKey(request.id, record.attempts, request.choice)
        attempt = Attempt(key, prefill, decode, begin(decision, self.name, now))
        record.begin(attempt)
        attempt.legs.update(filter(None, (decode, prefill)))
        self.decisions.book(record, key, decision, now)
        self.counters.placements[decision.way.value, decision.why.value] += 1
        record.to(RequestState.PLACED)
        models = self._registry.models_of(prefill, decode)
        record.marks.placed_at(now, self.name(prefill), self.name(decode), models)
        work = record.work(key, now)
        elsewhere = self.decisions.elsewhere(record, decision)
        if decode is not None:
            writer = self._registry.nodes[prefill].address if prefill is not None else None
            share = self.decisions.prefill_share(decision.demand)
            self.out.append(Send(decode, Submit(work, writer, share, elsewhere.get(decode))))
        if prefill is not None:
            self.out.append(Send(prefill, Prefill(work, alone=decode is None, elsewhere=elsewhere.get(prefill))))
            if decode is not None:
                attempt.answer_by = now + self._settings.answer_timeout
                self.timers.set(request.id, record.next_due())
        if record.holder is not None and decode not in (None, record.holder):
            self._followers.elsewhere(record)
        attempt.notes.held_back, record.held_back = record.held_back, 0.0
        pair = attempt.pair
        attempt.notes.probe = pair is not None and self.breakers.placed(pair, key)
        if record.attempts == 1:
            self.last_progress = now

    # while an attempt runs

    def reserved(self, record: Record, attempt: Attempt, now: float) -> None:
        record.to(RequestState.RESERVED)
        record.marks.mark("reserved", now)
        attempt.notes.reserved = now
        attempt.answer_by = None
        if record.attempts == 1:
            self.last_progress = now

    def give(self, attempt: Attempt, ticket: GiveTicket) -> None:
        attempt.transport = ticket.ticket.transport
        self.out.append(Send(ticket.ticket.writer, ticket))

    def committed(self, record: Record, attempt: Attempt) -> None:
        """Decode runs the attempt, and its cache has the prompt. The hand-off, if there was one, is over, and what
        happens to its writer from now on is nothing to this request, unless it owes the prompt's scores. Idempotent."""
        if not attempt.committed:
            attempt.committed = True
            if attempt.pair is not None and attempt.transport and self.breakers.committed(attempt.pair, attempt.key):
                self.pair_changed(attempt.pair)
            self.placeable |= self._followers.release(record.request.id, attempt.decode)
        if attempt.prefill is not None and not record.awaits_scores:
            self.close_leg(attempt, attempt.prefill)

    def emit(
        self, record: Record, attempt: Attempt, tokens: list[int], scores: tuple[TokenScore, ...], now: float
    ) -> None:
        """`tokens` continue the output exactly."""
        if record.state is not RequestState.STREAMING:
            if not record.emitted and record.prompt_scores is not None:
                if record.request.sampling.prompt_logprobs is not None:
                    self.out.append(EmitPromptScores(record.request.id, record.prompt_scores))
                record.prompt_scores = ()
            record.to(RequestState.STREAMING)
            record.marks.mark("first_token", now)
            self.knowledge.first_token(attempt.notes.prediction, now - attempt.notes.placed)
            attempt.answer_by = None
            record.prefill_payer = ""
        record.emitted += tokens
        self.queue.produced(record.request.id, len(tokens), now)
        self.admission.produced(record.request.standing.tenant, len(tokens), now)
        self.counters.generated_tokens += 0 if record.internal else len(tokens)
        self.last_progress = now
        self.out.append(Emit(record.request.id, tuple(tokens), scores))

    def close_leg(self, attempt: Attempt, node: Incarnation, cancel: BatonError | None = None) -> None:
        """The node's part is over, or is to be with `cancel`. Idempotent."""
        if node not in attempt.legs:
            return
        attempt.legs.remove(node)
        self.loads.end(node, attempt.key)
        self.placeable = True
        if cancel is not None:
            self.out.append(Send(node, Cancel(attempt.key, cancel)))

    def pair_changed(self, pair: Pair) -> None:
        """The breaker between two nodes has another state."""
        state = self.breakers.state(pair)
        self.counters.breakers[state.value] += 1
        self.placeable = True
        self.out.append(PairChanged(self.name(pair[0]), self.name(pair[1]), state))

    # the ways on and out

    def replace(self, record: Record, error: BatonError | None, now: float, *, exempt: bool = False) -> None:
        """The one recovery: give up this attempt and put the request, with what it has emitted, at the head of the
        queue, or let it rest first if it failed before; the client sees nothing. `error` None is a refusal. Refusals,
        preemptions and drains wait for room and do not count as failures; other errors do, and one that no other
        attempt can mend ends the request. Failures are subject to the retry budget, unless `exempt`. A probe has one
        attempt: another would tell less."""
        waits = error is None or isinstance(error, Preempted | Drained)
        record.failures += not waits
        most = self._settings.max_attempts if record.pin is None else 0
        if error is not None and (not error.replaceable or record.failures >= most):
            self.end(record, error, now)
            return
        exempt |= waits
        if error is not None and not exempt and not self.retries.has_room(now):
            self.end(record, error, now)
            return
        attempt = record.attempt
        if attempt is not None:
            spared = error is None or isinstance(error, Drained)
            record.avoid = frozenset() if spared else record.blamed(attempt, self._registry.nodes)
            self._leave_attempt(record, attempt, error or Cancelled("the other node has no room"))
            attempt.notes.end(now, error.code if error else REFUSED, error.message if error else "no room there")
            self.out.append(Replaced(attempt.key, error.message if error is not None else "refused"))
        record.holder = None
        record.replaced_because = error.code if error is not None else "refused"
        self.counters.replaced[record.replaced_because] += 1
        record.attempt = None
        record.to(RequestState.QUEUED)
        rest = 0.0 if waits else rest_after(record.failures)
        self.placeable |= self.retries.again(record, rest, now, exempt=exempt)

    def end(self, record: Record, result: FinishReason | BatonError, now: float) -> None:
        """The one place where a request ends."""
        request = record.request.id
        if record.attempt is not None:
            reason = result if isinstance(result, BatonError) else Cancelled("the request has ended")
            ended = result.code if isinstance(result, BatonError) else SERVED
            record.attempt.notes.end(now, ended, result.message if isinstance(result, BatonError) else "")
            self._leave_attempt(record, record.attempt, reason)
        del self.records[request]
        self.queue.remove(request)
        self.timers.clear(request)
        self.placeable |= self._followers.release(request, None)
        self._unadmitted.discard(request)
        self.too_long.forget(request)
        self.retries.forget(request)
        if record.pin is not None:
            self.probed.append((request, result))
        elif not record.attempts:
            self.admission.give_back(record.request, now, accepted=record.admit_by is None)
        if isinstance(result, FinishReason):
            began = record.marks.first_token
            self.knowledge.answered(record.request, len(record.emitted), now - began if began is not None else 0.0)
        self.out.append(self.endings.add(record, result, now))

    def lose_node(self, node: Incarnation, error: BatonError, now: float) -> None:
        """The node is no more, and off the registry: what had a leg there goes on elsewhere, the oldest first, whatever
        the retry budget says. So does what failed there a moment ago, before anybody knew why."""
        self.breakers.forget(node)
        self.placeable |= self.retries.lost(node, now)
        for key in reversed(self.loads.remove_node(node)):
            record = self.records.get(key.request)
            if record is not None and record.attempt is not None and record.attempt.key == key:
                record.attempt.legs.discard(node)
                self.replace(record, error if error.replaceable else NodeGone(error.message), now, exempt=True)

    def vacate(self, node: Incarnation, error: BatonError, now: float) -> None:
        """Everything that has a leg there goes on elsewhere, the oldest first."""
        for key in reversed(self.loads.placed_on(node)):
            record = self.records.get(key.request)
            if record is not None and record.attempt is not None and record.attempt.key == key:
                self.replace(record, error, now)

    def due(self, request: RequestId, now: float) -> None:
        """Time alone has passed for this request."""
        record = self.records[request]
        attempt = record.attempt
        if now >= record.deadline:
            self.end(record, self.too_long.deadline_error(record), now)
        elif record.not_before is not None and now >= record.not_before:
            self.placeable |= self.retries.rested(record)
        elif record.admit_by is not None and now >= record.admit_by:
            why = self.missing() or self.capacity.why_too_long(record)
            waited = f"no node could serve the request for {UNSERVED_PATIENCE:g} s: {why}"
            self.end(record, Unavailable(waited, retry_after=UNSERVED_PATIENCE), now)
        elif attempt is not None and attempt.answer_by is not None and now >= attempt.answer_by:
            silent = self.name(attempt.decode)
            waited = f"{self._settings.answer_timeout:g} s"
            self.replace(record, Stalled(f"node {silent} did not answer a request for {waited} (--stall)"), now)
        if request in self.records:
            self.timers.set(request, record.next_due())

    def missing(self) -> str:
        """What keeps the cluster from serving, "" if nothing does. Decode nodes can serve alone: see `Decisions`."""
        return self._registry.lacks(Role.DECODE)

    def _leave_attempt(self, record: Record, attempt: Attempt, reason: BatonError) -> None:
        attempt.prompt_scores.clear()
        attempt.held.clear()
        for node in sorted(attempt.legs):
            self.close_leg(attempt, node, reason)
        if attempt.pair is not None:
            self.placeable |= self.breakers.left(attempt.pair, attempt.key)
        count_sources(record, attempt, self.counters, last=True)
