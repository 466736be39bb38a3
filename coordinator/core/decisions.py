"""One placement: what an attempt needs, what is known of the nodes, what the policy chose and what it expects."""

from collections.abc import Iterator, Sequence
from typing import Literal

from baton.errors import DeadlineExceeded
from baton.pool_terms import Elsewhere
from baton.types import AttemptKey, Incarnation, NodeName, Role
from coordinator.core.admission import Admission
from coordinator.core.breakers import Breakers
from coordinator.core.degradation import Degradation, Step
from coordinator.core.knowledge import Knowledge
from coordinator.core.loads import Loads
from coordinator.core.placement import Choice, Demand, NodeView, Outlook, Placement
from coordinator.core.prediction import Decision, Why
from coordinator.core.prospects import Prospects
from coordinator.core.record import Record
from coordinator.core.registry import Registry
from coordinator.core.ways import Ways

Mode = Literal["disaggregated", "colocated", "auto"]


class Decisions:
    def __init__(
        self,
        registry: Registry,
        loads: Loads,
        placement: Placement,
        knowledge: Knowledge,
        admission: Admission,
        prospects: Prospects,
        breakers: Breakers,
        degradation: Degradation,
        mode: Mode,
        prefill_share: float = 0.0,
    ) -> None:
        """`prefill_share`: what prompts may add to the steps of the decode node that computes them, unless the mode is
        colocated."""
        self._registry = registry
        self._loads = loads
        self._ways = Ways(placement)
        self._knowledge = knowledge
        self._admission = admission
        self._prospects = prospects
        self._breakers = breakers
        self._mode = mode
        self._share = prefill_share
        self._degradation = degradation

    def prefill_share(self, demand: Demand) -> float:
        """What prompts that a decode node computes may add to its steps, as a share of these; 0: there is no bound."""
        bounded = self._mode == "auto" or (self._mode != "colocated" and not demand.prefill)
        return self._share if bounded else 0.0

    @property
    def local_only(self) -> bool:
        """Do decode nodes compute every prompt although the mode provides for hand-offs?"""
        return (self._mode != "colocated" and Step.LOCAL_PREFILL_ONLY in self._degradation) or bool(
            self.missing_prefill()
        )

    def missing_prefill(self) -> str:
        """Why no prefill node can be given work, so that decode nodes compute the prompts themselves. Empty if one can,
        if the mode has no hand-offs, or if no decode node serves either."""
        if self._mode == "colocated" or not self._registry.serves(Role.DECODE):
            return ""
        return self._registry.lacks(Role.PREFILL)

    def views(self, now: float) -> list[NodeView]:
        """Every node that may be given work."""
        self._loads.keep_scale(now)
        return [self._loads.view(node) for node in self._registry.in_service()]

    def decide(self, record: Record, views: Sequence[NodeView], now: float, headroom: float = 0.0) -> Decision | None:
        """None: wait."""
        views = self._offered(record, views)
        if not views:
            return None
        demand = self.demand(record, look_up=True, headroom=headroom)
        layout = self._registry.layout()
        unit = self._loads.unit(now)
        costs, share = self._knowledge.costs, self.prefill_share(demand)
        outlook = Outlook(now, costs, unit, layout.token_bytes, layout.block_size, share)
        either = self._mode == "auto" and demand.prefill and record.pin is None
        return self._ways.decide(demand, views, outlook, self._why(demand), either=either, apart=self._breakers.apart)

    def too_late(self, record: Record, now: float, *, wanted: bool) -> DeadlineExceeded | None:
        """Why the request cannot be served any more, if so. `wanted`: others wait for its place, and unless its client
        has a part of the answer already, it is not to be had for one that would be cut off. Caches are looked at only
        when the deadline is near."""
        tokens, left, request = record.context_tokens, record.deadline - now, record.request
        if wanted and not record.emitted:
            left -= self._knowledge.answers.expect(request.standing.tenant, request.sampling.max_tokens)
        if self._prospects.too_late(tokens, 0, left) is None:
            return None
        held = min(max(self._held(record).values(), default=0), tokens - 1)
        return self._prospects.too_late(tokens, tokens - 1 if record.holder else held, left)

    def demand(self, record: Record, *, look_up: bool = False, headroom: float = 0.0) -> Demand:
        """What the next attempt needs; with `look_up`, also whose caches have its prompt. The last token of an output
        needs no decode node where there is prefill. Without a prefill node that can hold the context the decode node
        computes it."""
        prefill = self._mode != "colocated" and self._may_prefill(record)
        if Step.LOCAL_PREFILL_ONLY in self._degradation and record.pin is None:
            prefill &= record.remaining <= 1 and not self._registry.can_hold(Role.DECODE, record.length)
        block_size = self._registry.layout().block_size
        tokens = record.context_tokens + min(record.remaining, block_size)
        return Demand(
            tokens=record.context_tokens,
            blocks=-(-tokens // block_size),
            prefill=prefill,
            decode=not prefill or record.remaining > 1,
            avoid=record.avoid,
            holder=record.holder,
            held=self._held(record) if look_up else {},
            reserve=self._admission.reserve_against(record.request.standing),
            headroom=headroom,
            output=max(1.0, self._knowledge.output_of(record.request) - len(record.emitted)),
            length=record.length,
        )

    def book(self, record: Record, key: AttemptKey, decision: Decision, now: float) -> None:
        """Write the legs into the books. Who computes the prompt has its tokens and seconds."""
        demand, choice, prediction = decision.demand, decision.choice, decision.prediction
        if key.attempt == 1:
            record.cached_before = max(demand.held.values(), default=0)
        for node in _legs(choice):
            computes = node == (choice.prefill or choice.decode)
            self._loads.place(
                node,
                key,
                demand.lacked_by(node) if computes else 0,
                demand.blocks,
                first_class=not record.request.standing.level,
                seconds=prediction.prefill if computes else 0.0,
                resident=prediction.resident,
                now=now,
            )
        self._knowledge.costs.give_work(self._name(choice.prefill), self._name(choice.decode))

    def elsewhere(self, record: Record, decision: Decision) -> dict[Incarnation, Elsewhere]:
        """What the chosen nodes' pools may fetch from another host's."""
        choice, demand = decision.choice, decision.demand
        computes = choice.prefill or choice.decode
        if record.awaits_scores or record.names is None or computes is None:
            return {}
        cost = self._knowledge.costs.node(self._registry.nodes[computes].info.name)
        told = {}
        for node, (pool, tokens) in self._knowledge.elsewhere(record.names, _legs(choice)).items():
            here = demand.held_by(node)
            told[node] = Elsewhere(pool.address, tokens, cost.prefill(tokens - here, here) / (tokens - here))
        return told

    def _offered(self, record: Record, in_service: Sequence[NodeView]) -> Sequence[NodeView]:
        """Nodes in service; for a probe its own node as the only one of its role."""
        if record.pin is None:
            return in_service
        node = self._registry.nodes.get(record.pin)
        if node is None:
            return []
        return [*(view for view in in_service if view.role is not node.info.role), self._loads.view(node)]

    def _name(self, node: Incarnation | None) -> NodeName | None:
        return self._registry.nodes[node].info.name if node is not None else None

    def _may_prefill(self, record: Record) -> bool:
        """Is there a prefill node in service, or the one that is to be probed, that can hold the context?"""
        tokens = record.context_tokens + 1
        pinned = self._registry.nodes.get(record.pin) if record.pin else None
        if pinned is not None and pinned.info.role is Role.PREFILL:
            return pinned.info.context >= tokens
        return self._registry.can_hold(Role.PREFILL, tokens)

    def _why(self, demand: Demand) -> Why:
        """Why the prompt is computed as the demand says."""
        if self._mode == "colocated" or demand.prefill:
            return Why.MODE
        if Step.LOCAL_PREFILL_ONLY in self._degradation:
            return Why.DEGRADED
        return Why.PREFILL_TOO_SMALL if self._registry.serves(Role.PREFILL) else Why.NO_PREFILL_NODE

    def _held(self, record: Record) -> dict[Incarnation, int]:
        """By the directory. A prompt that is to be scored is computed without a look at any cache."""
        if record.awaits_scores:
            return {}
        if record.names is None:
            record.names = self._knowledge.names_of(record.request)
        return self._knowledge.held(record.names)


def _legs(choice: Choice) -> Iterator[Incarnation]:
    return filter(None, (choice.decode, choice.prefill))
