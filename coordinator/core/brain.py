"""The whole brain behind one door: inputs with the time, effects in order. Its shell is `coordinator/dispatcher.py`;
a simulator is another."""

import math
from collections.abc import Sequence

from baton.errors import BatonError, Drained, NodeGone, NotFound, Rejected
from baton.limits import ModelBounds
from baton.pb.cluster_pb2 import ExplainResponse
from baton.pb.common_pb2 import Timeline
from baton.ratio import Split
from baton.slo import Slo
from baton.types import FinishReason, Incarnation, NodeName, Request, RequestId, Standing
from coordinator.core.admission import Bid
from coordinator.core.breakers import Breakers
from coordinator.core.counters import Counters
from coordinator.core.degradation import Degradation
from coordinator.core.drains import Service, is_empty
from coordinator.core.explain import MAX_AGE, explain
from coordinator.core.identity import JoinInfo
from coordinator.core.knowledge import Knowledge
from coordinator.core.messages import Degraded, Effect, Heartbeat, Lost, NodeInput, PeerGone, Send, Steered
from coordinator.core.model_change import count_bound_requests, end_requests_of_model
from coordinator.core.pilot import Pilot
from coordinator.core.placement import Placement
from coordinator.core.pool_desk import PoolDesk
from coordinator.core.pools import PoolInfo, PoolMember
from coordinator.core.reception import Arrival, Reception
from coordinator.core.record import RequestState
from coordinator.core.registry import Node, Registry
from coordinator.core.reports import Reports
from coordinator.core.requests import RequestTable
from coordinator.core.retries import Retries
from coordinator.core.settings import Settings
from coordinator.core.strain import Strain
from coordinator.core.switches import Switches
from coordinator.core.tenants import Tenants


class Brain:
    def __init__(self, registry: Registry, placement: Placement, settings: Settings) -> None:
        self.registry = registry
        self._table = RequestTable(registry, placement, settings)
        self._reception = Reception(self._table, settings)
        self._reports = Reports(registry, self._table)
        self.switches = Switches(registry, self._table, settings.mode, self._drop)
        self.pilot = Pilot(registry, self._table, self.switches, settings.slo)
        self._strain = Strain(self._table, settings)
        self._pool_desk = PoolDesk(registry, self._table)

    # inputs

    def submit(self, request: Request, now: float, *, internal: bool = False) -> list[Effect]:
        """Take a request in. `Admit` follows at once, or when nodes that can serve it have come; else it ends with
        Unavailable after `UNSERVED_PATIENCE`. Raises Draining, Overloaded, Unavailable or TooLong, counted."""
        return self.submit_all([Arrival(request)], now, internal=internal)

    def submit_all(self, arrivals: Sequence[Arrival], now: float, *, internal: bool = False) -> list[Effect]:
        """Take all of them in, in this order, or none of them: `submit`'s errors, each counted once, and InvalidRequest
        if the queue could never hold so many."""
        self._reception.take_in(arrivals, now, internal=internal)
        return self._effects(now)

    def refuse(self, error: Rejected, tenant_class: str, now: float) -> None:
        """Count a request that is turned away before it is submitted."""
        self._reception.refuse(error, tenant_class, now)

    def require_admission(self, standing: Standing, count: int, timeout: float, now: float) -> None:
        """Whether `count` requests would be let in, as far as can be said without a look at their prompts: before
        anything is spent on them. Raises Draining, Overloaded or InvalidRequest; not counted."""
        self._reception.require(standing, Bid(count, timeout), now)

    def reload_tenants(self, tenants: Tenants, now: float) -> list[Effect]:
        """Other tenants from now on. Requests that are here keep their standing."""
        self._table.admission.reload(tenants, now)
        self._table.placeable = True
        return self._effects(now)

    def join(self, info: JoinInfo, incarnation: Incarnation, now: float) -> list[Effect]:
        """A node joins as `incarnation`; an older one of its process is gone. Raises ConfigError, counted: see
        `Registry.check`. The first node of another model ends the requests that were admitted under the former one."""
        try:
            replaced = self.registry.check(info, now, count_bound_requests(self._table.records.values()))
        except BatonError:
            self.counters.joins["refused"] += 1
            raise
        if replaced is not None:
            self._drop(replaced, NodeGone(f"node {info.name} has joined anew"), now)
        former = self.registry.model_digest
        node = self.registry.add(info, incarnation, now)
        if former != node.model_digest:
            end_requests_of_model(self._table, former, now)
        self._table.capacity.node_joined(info)
        self._table.knowledge.joined(node)
        self._table.loads.add_node(incarnation)
        self.switches.joined(node, now)
        self._table.placeable = True
        self.counters.joins["joined"] += 1
        return self._effects(now)

    def join_pool(self, info: PoolInfo, incarnation: Incarnation, now: float) -> list[Effect]:
        """A host's pool joins; an older one of its name is gone. Raises ConfigError, counted."""
        self._pool_desk.join(info, incarnation, now)
        return self._effects(now)

    def receive(self, sender: Incarnation, message: NodeInput, now: float) -> list[Effect]:
        """A message of a node or a pool; dropped if `sender` is no member."""
        if self._pool_desk.hear(sender, message, now):
            return self._effects(now)
        node = self.registry.nodes.get(sender)
        if node is None:
            self.counters.dropped_messages["stale"] += 1
            return []
        node.heard_at = now
        self._reports.receive(sender, message, now)
        if isinstance(message, Heartbeat):
            self.switches.heard()
        return self._effects(now)

    def node_gone(self, incarnation: Incarnation, error: BatonError, now: float) -> list[Effect]:
        """Also of a pool. Idempotent."""
        self._pool_desk.drop(incarnation, error)
        node = self.registry.nodes.get(incarnation)
        if node is not None:
            self._drop(node, error, now)
        return self._effects(now)

    def cancel(self, request: RequestId, error: BatonError, now: float) -> list[Effect]:
        """End a request with `error`, in whatever state it is; a no-op after its end."""
        record = self._table.records.get(request)
        if record is not None:
            self._table.end(record, error, now)
        return self._effects(now)

    def stop(self, request: RequestId, now: float) -> list[Effect]:
        """End a request well: its client has all that it wants. A no-op after its end."""
        record = self._table.records.get(request)
        if record is not None:
            self._table.end(record, FinishReason.STOP, now)
        return self._effects(now)

    def drain(self) -> None:
        """Refuse new requests from now on. Those that are here go on."""
        self._reception.draining = True

    def drain_node(self, name: NodeName, timeout: float | None, now: float) -> list[Effect]:
        """Give the node no new work. What it still holds after `timeout` seconds (None: however long it takes) is
        placed again. Raises NotFound."""
        self.node_called(name)
        self.registry.drains.begin(name, None if timeout is None else now + timeout)
        self._table.placeable = True
        self.switches.reconsider()
        return self.tick(now)

    def undrain_node(self, name: NodeName, now: float) -> list[Effect]:
        """A no-op for a node that is in service. Raises NotFound for a name that is neither a node's nor drained."""
        if not self.registry.drains.end(name):
            self.node_called(name)
        self._table.placeable = True
        self.switches.reconsider()
        return self._effects(now)

    def set_ratio(self, target: Split, patience: float, now: float) -> list[Effect]:
        """Switch nodes in place until they have this ratio, and keep them so. What a node still does `patience` seconds
        after it was chosen is placed again elsewhere. Ends `auto_ratio`. Raises InvalidRequest, naming the splits that
        are possible."""
        self.switches.aim(target, patience, now)
        self.pilot.manual()
        return self._effects(now)

    def auto_ratio(self, slo: Slo | None, patience: float, now: float) -> list[Effect]:
        """Change the ratio so that an objective is kept, the default one if it is None, until `manual_ratio` or
        `set_ratio`."""
        self.pilot.auto(slo, patience, now)
        return self._effects(now)

    def manual_ratio(self) -> None:
        """Idempotent. Nodes that are on their way go on."""
        self.pilot.manual()

    def tick(self, now: float) -> list[Effect]:
        """Whatever time alone has made due: silent and stuck nodes, deadlines, patience; and a slice of what is to be
        tidied up."""
        self.knowledge.directory.sweep()
        for node, error in self.registry.expired(now, self._table.loads.busy()):
            self._drop(node, error, now)
        self._table.capacity.expire(now)
        self._pool_desk.expire(now)
        for name in self.registry.drains.due(now):
            drained = self.registry.called(name)
            if drained is not None:
                self._table.vacate(drained.incarnation, Drained(f"node {name} is being drained"), now)
        for pair in self._table.breakers.due(now):
            self._table.pair_changed(pair)
        self.switches.due(now)
        steered = self.pilot.due(now)
        if steered is not None:
            self._table.out.append(Steered(steered, self.pilot.reason))
        for request in self._table.timers.due(now):
            self._table.due(request, now)
        return self._effects(now)

    def next_due(self) -> float | None:
        """When `tick` is to be called next if nothing else happens."""
        members = self.registry.next_silence(), self.registry.drains.next(), self.knowledge.pools.next_silence()
        tidying = -math.inf if self.knowledge.directory.is_to_sweep else None  # as soon as others have had their turn
        times = (*members, self.switches.next(), self.pilot.next(), tidying, *self._table.next_due())
        return min((time for time in times if time is not None), default=None)

    # views

    @property
    def counters(self) -> Counters:
        return self._table.counters

    @property
    def knowledge(self) -> Knowledge:
        return self._table.knowledge

    @property
    def tenant_classes(self) -> tuple[str, ...]:
        """Of the file of tenants, or the one class of all clients."""
        return self._table.admission.tenants.classes

    def members(self) -> list[Node | PoolMember]:
        """All that a ledger, failpoints and counters can be asked of."""
        return [*self.registry.nodes.values(), *self.knowledge.pools.members.values()]

    @property
    def draining(self) -> bool:
        return self._reception.draining

    @property
    def queued(self) -> int:
        """Requests that wait to be placed."""
        return len(self._table.queue) + self._table.queue.aside + len(self._table.retries)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for their turn to be placed."""
        return self._table.queue.tokens

    @property
    def running(self) -> int:
        """Requests placed and not ended."""
        return len(self._table.records) - self.queued

    def stood_still(self, now: float) -> float:
        """Seconds for which requests have been here and none of them got further than it had been."""
        return now - self._table.last_progress if self._table.records else 0.0

    @property
    def breakers(self) -> Breakers:
        return self._table.breakers

    @property
    def retries(self) -> Retries:
        return self._table.retries

    def active(self) -> list[RequestId]:
        return list(self._table.records)

    def state(self, request: RequestId) -> RequestState | None:
        """None once it has ended."""
        return record.state if (record := self._table.records.get(request)) else None

    def timeline(self, request: RequestId) -> Timeline | None:
        """Of a request that has ended not long ago."""
        return self._table.endings.timelines.get(request)

    def explain(self, request: RequestId, now: float) -> ExplainResponse:
        """Of a request that is here or has ended not long ago, with the others of its answer if it is the first. Raises
        NotFound."""
        told = self._told(request, now)
        if told is None:
            most = self._table.endings.explanations.most
            raise NotFound(
                f"there is no request {request[:64]!r}: the last {most} that have ended are "
                f"kept (--explain-keep), for {MAX_AGE / 3600:g} h at most"
            )
        for other in told.others:
            known = self._told(RequestId(other.request_id), now)
            if known is not None:
                for attempt in known.attempts:
                    attempt.ClearField("considered")
                other.CopyFrom(known)
        return told

    def placed_on(self, node: Incarnation) -> int:
        return self._table.loads.attempts(node)

    def node_called(self, name: NodeName) -> Node:
        """Raises NotFound."""
        node = self.registry.called(name)
        if node is None:
            names = ", ".join(sorted(node.info.name for node in self.registry.nodes.values())) or "none"
            raise NotFound(f"there is no node {name[:64]!r}: nodes are {names}", param="node")
        return node

    def service(self, node: Node) -> Service:
        if node.info.name not in self.registry.drains:
            return Service.SWITCHING if node.info.name in self.registry.switching else Service.IN
        loads, incarnation = self._table.loads, node.incarnation
        empty = is_empty(loads.attempts(incarnation), loads.quiet_reports(incarnation), node.stats)
        return Service.DRAINED if empty else Service.DRAINING

    def missing(self) -> str:
        """What keeps the cluster from serving, "" if nothing does."""
        return self._table.missing()

    @property
    def degradation(self) -> Degradation:
        return self._table.degradation

    @property
    def local_prefill_only(self) -> bool:
        """Do decode nodes compute every prompt although the mode provides for hand-offs?"""
        return self._table.decisions.local_only

    def missing_prefill(self) -> str:
        """Why no prefill node can be given work while decode nodes serve without; "" if one can."""
        return self._table.decisions.missing_prefill()

    def bounds(self) -> ModelBounds:
        """Raises Unavailable before the first join."""
        return self._reception.bounds()

    # inside

    def _told(self, request: RequestId, now: float) -> ExplainResponse | None:
        record = self._table.records.get(request)
        return explain(record, now) if record else self._table.endings.explanations.get(request, now)

    def _effects(self, now: float) -> list[Effect]:
        self.switches.step(now)
        self._degrade(now)
        self._table.place_waiting(now)
        out, self._table.out = self._table.out, []
        return out

    def _degrade(self, now: float) -> None:
        degradation = self._table.degradation
        change = degradation.read(self._strain.reading(now), now) if degradation.is_due(now) else None
        if change is not None:
            self._table.placeable = True
            self._table.admission.degraded(now)
            self._table.out.append(Degraded(change.step.value, change.taken, change.pressure))

    def _drop(self, node: Node, error: BatonError, now: float) -> None:
        self.registry.remove(node.incarnation)
        self._table.capacity.node_left(node.info, now)
        self._table.placeable = True  # what waits for a prefill node may go on without one
        self._table.knowledge.left(node.incarnation)
        expected = self.switches.expects_end_of(node)
        if not expected:
            self.counters.nodes_lost[error.code] += 1
        self._table.out.append(Lost(node.incarnation, node.info.name, error, expected))
        self._table.out += [Send(other, PeerGone(node.incarnation)) for other in self.registry.nodes]
        self._table.lose_node(node.incarnation, error, now)
        self.switches.gone(node, now)
