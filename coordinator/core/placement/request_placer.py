"""Places one request: builds the demand, asks the policy, and books the legs of the attempt.

`LatencyEstimator` estimates the latency that a new request can expect, from the cost model and what
is placed on each node.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from baton.errors import DeadlineExceeded
from baton.kv.pool_types import RemotePrefix
from baton.types import AttemptKey, Incarnation, NodeName, Role
from coordinator.core.admission.admission_controller import AdmissionController
from coordinator.core.admission.degradation import DegradationController, DegradationStep
from coordinator.core.estimates.cost_model import CostModel, DecodeTimePredictor
from coordinator.core.membership.node_registry import ContextCapacity, NodeRegistry
from coordinator.core.placement.breakers import CircuitBreakers
from coordinator.core.placement.disaggregation import DisaggregationPolicy
from coordinator.core.placement.interface import (
    BLOCKED_PAIR,
    FAILED_BEFORE,
    RAMPING_UP,
    ConsideredNode,
    NodeChoice,
    PlaceableRequest,
    PlacementContext,
    PlacementDecision,
    PlacementPolicy,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.placement.node_loads import NodeLoads, NodeView, PlacementDemand
from coordinator.core.placement.placement_state import PlacementState
from coordinator.core.placement.policies import decide_nodes, is_ramping_up

ServingMode = Literal["disaggregated", "colocated", "auto"]


_OPTIMISM = 0.5  # of the fastest prediction, so that borderline requests get their chance


class LatencyEstimator:
    """Estimates waits and service times for admission, and deadlines that cannot be met."""

    def __init__(
        self,
        registry: NodeRegistry,
        loads: NodeLoads,
        cost_model: CostModel,
        decode_times: DecodeTimePredictor,
    ) -> None:
        self._registry = registry
        self._decode_times = decode_times
        self._loads = loads
        self._cost_model = cost_model

    def prefill_seconds(self, tokens: int) -> float:
        """Return the seconds to compute a prompt with no cached tokens on an idle node."""
        return self._cost_model.fleet_costs.prefill_seconds(tokens, 0)

    def decode_seconds(self, tenant: str, max_tokens: int) -> float:
        """Return the seconds that a placed request takes besides computing its prompt."""
        return self._decode_times.predict_seconds(tenant, max_tokens)

    def node_wait_seconds(self, now: float) -> float:
        """Return the seconds until the first node that computes prompts has no prompt left."""
        role = Role.PREFILL if self._registry.has_serving_node(Role.PREFILL) else Role.DECODE
        least_wait = math.inf
        for node in self._registry.nodes_in_service(role):
            least_wait = min(least_wait, self._loads.get_view(node).queue_wait_seconds(now))
            if least_wait == 0.0:
                break
        return least_wait if least_wait < math.inf else 0.0

    def is_decode_full(self, blocks: int = 0) -> bool:
        """Return whether every decode node is out of slots, or of room for so many more blocks."""
        decode = (
            self._loads.get_view(node) for node in self._registry.nodes_in_service(Role.DECODE)
        )
        return all(
            view.attempts >= view.max_num_seqs or view.free_blocks < blocks for view in decode
        )

    def find_deadline_error(
        self, tokens: int, cached_tokens: int, time_left: float, output_seconds: float = 0.0
    ) -> DeadlineExceeded | None:
        """Return the error if the context cannot be computed in `time_left` seconds less those of
        the output; `cached_tokens` of it seem to be cached."""
        if self._cost_model.can_prefill_within(
            tokens - cached_tokens, cached_tokens, (time_left - output_seconds) / _OPTIMISM
        ):
            return None
        least_seconds = _OPTIMISM * self._cost_model.fastest_prefill_seconds(
            tokens - cached_tokens, cached_tokens
        )
        needed = f"a prompt of {tokens} tokens takes {least_seconds:.3g} s at least"
        left = f"{max(time_left, 0.0):.3g} s are left"
        if output_seconds:
            needed += f", and its output about {output_seconds:.3g} s"
            left += ", and other requests wait for the place"
        return DeadlineExceeded(f"{needed}: {left}")


class RequestPlacer:
    """Decides the nodes of an attempt, and books the attempt on them."""

    def __init__(
        self,
        registry: NodeRegistry,
        loads: NodeLoads,
        policy: PlacementPolicy,
        state: PlacementState,
        capacity: ContextCapacity,
        admission: AdmissionController,
        latency_estimator: LatencyEstimator,
        breakers: CircuitBreakers,
        degradation: DegradationController,
        mode: ServingMode,
        local_prefill_share: float = 0.0,
    ) -> None:
        self._registry = registry
        self._loads = loads
        self._policy = policy
        self._disaggregation = DisaggregationPolicy(policy)
        self._state = state
        self._cached_prefixes = state.cached_prefixes
        self._capacity = capacity
        self._admission = admission
        self._latency_estimator = latency_estimator
        self._breakers = breakers
        self._mode = mode
        self._local_prefill_share = local_prefill_share
        self._degradation = degradation

    def get_local_prefill_share(self, demand: PlacementDemand) -> float:
        """Return how much prompts computed on a decode node may lengthen its steps; 0: no bound."""
        bounded = self._mode == "auto" or (self._mode != "colocated" and not demand.needs_prefill)
        return self._local_prefill_share if bounded else 0.0

    @property
    def is_local_prefill_only(self) -> bool:
        """Whether decode nodes compute every prompt although the mode has hand-offs."""
        return (
            self._mode != "colocated"
            and DegradationStep.LOCAL_PREFILL_ONLY in self._degradation.active_steps
        ) or bool(self.why_no_prefill())

    def why_no_prefill(self) -> str:
        """Return why no prefill node can be given work, so that decode nodes compute the prompts.
        "" if one can, if the mode has no hand-offs, or if no decode node serves either."""
        if self._mode == "colocated" or not self._registry.has_serving_node(Role.DECODE):
            return ""
        return self._registry.why_unavailable(Role.PREFILL)

    def list_node_views(self, now: float) -> list[NodeView]:
        """Return the snapshots of every node in service."""
        self._loads.rescale_recent_work(now)
        return [self._loads.get_view(node) for node in self._registry.nodes_in_service()]

    def decide_placement(
        self, record: PlaceableRequest, views: Sequence[NodeView], now: float, headroom: float = 0.0
    ) -> PlacementDecision | None:
        """Choose nodes for the next attempt; None is to wait."""
        views = self._candidate_views(record, views)
        if not views:
            return None
        demand = self.make_demand(record, look_up=True, headroom=headroom)
        layout = self._registry.get_layout()
        work_unit = self._loads.work_unit(now)
        costs, share = self._state.cost_model, self.get_local_prefill_share(demand)
        context = PlacementContext(
            now, costs, work_unit, layout.token_bytes, layout.block_size, share
        )
        blocked_pairs = self._breakers.blocked_pairs
        if self._mode == "auto" and demand.needs_prefill and record.probe_node is None:
            return self._disaggregation.decide_placement(demand, views, context, blocked_pairs)
        decision = decide_nodes(self._policy, demand, views, context, blocked_pairs)
        if decision is None or decision.reason is PlacementReason.PREFIX_CACHED:
            return decision
        site = PrefillSite.HAND_OFF if demand.needs_prefill else PrefillSite.LOCAL
        return replace(decision, prefill_site=site, reason=self._fixed_reason(demand))

    def find_deadline_error(
        self, record: PlaceableRequest, now: float, *, has_rivals: bool
    ) -> DeadlineExceeded | None:
        """Return the error if the request cannot meet its deadline any more.

        With `has_rivals`, other requests wait for its place: then one that has emitted nothing must
        also have time for its output. Caches are looked up only when the deadline is near.
        """
        tokens, time_left, request = record.context_tokens, record.deadline - now, record.request
        output_seconds = 0.0
        if has_rivals and not record.emitted_token_ids:
            output_seconds = self._state.decode_times.predict_seconds(
                request.principal.tenant, request.sampling.max_tokens
            )
        find_error = self._latency_estimator.find_deadline_error
        if find_error(tokens, 0, time_left, output_seconds) is None:
            return None
        cached_tokens = min(max(self._cached_by_node(record).values(), default=0), tokens - 1)
        if record.prefix_holder:
            cached_tokens = tokens - 1
        return find_error(tokens, cached_tokens, time_left, output_seconds)

    def make_demand(
        self, record: PlaceableRequest, *, look_up: bool = False, headroom: float = 0.0
    ) -> PlacementDemand:
        """Build the demand of the next attempt; with `look_up`, including who caches the prompt.

        The last token of an output needs no decode node if there is prefill. Without a prefill node
        that can hold the context, the decode node computes it.
        """
        prefill = self._mode != "colocated" and self._can_prefill(record)
        if (
            DegradationStep.LOCAL_PREFILL_ONLY in self._degradation.active_steps
            and record.probe_node is None
        ):
            prefill &= record.remaining_tokens <= 1 and not self._capacity.can_fit_context(
                Role.DECODE, record.max_total_tokens
            )
        block_size = self._registry.get_layout().block_size
        tokens = record.context_tokens + min(record.remaining_tokens, block_size)
        return PlacementDemand(
            context_tokens=record.context_tokens,
            blocks=-(-tokens // block_size),
            needs_prefill=prefill,
            needs_decode=not prefill or record.remaining_tokens > 1,
            avoided_nodes=record.avoided_nodes,
            prefix_holder=record.prefix_holder,
            cached_by_node=self._cached_by_node(record) if look_up else {},
            reserved_share=self._admission.reserved_share(record.request.principal),
            headroom_share=headroom,
            expected_output_tokens=max(
                1.0,
                self._state.output_lengths.predict_tokens(
                    record.request.principal.tenant, record.request.sampling.max_tokens
                )
                - len(record.emitted_token_ids),
            ),
            max_total_tokens=record.max_total_tokens,
        )

    def book_legs(
        self, record: PlaceableRequest, key: AttemptKey, decision: PlacementDecision, now: float
    ) -> None:
        """Book the legs; the node that computes the prompt gets its tokens and seconds."""
        demand, choice, prediction = decision.demand, decision.choice, decision.prediction
        if key.attempt_number == 1:
            record.cached_at_first_placement = max(demand.cached_by_node.values(), default=0)
        for node in _chosen_nodes(choice):
            computes = node == (choice.prefill or choice.decode)
            self._loads.add_leg(
                node,
                key,
                demand.uncached_tokens_on(node) if computes else 0,
                demand.blocks,
                first_class=not record.request.principal.priority_level,
                seconds=prediction.prefill_seconds if computes else 0.0,
                resident=prediction.resident_tokens,
                now=now,
            )
        self._state.cost_model.on_work_placed(
            self._node_name(choice.prefill), self._node_name(choice.decode)
        )

    def find_remote_prefixes(
        self, record: PlaceableRequest, decision: PlacementDecision
    ) -> dict[Incarnation, RemotePrefix]:
        """Return, for each chosen node, what its pool may fetch from another host's pool."""
        choice, demand = decision.choice, decision.demand
        computes = choice.prefill or choice.decode
        if record.awaits_prompt_logprobs or record.prompt_block_hashes is None or computes is None:
            return {}
        cost = self._state.cost_model.get_node_costs(self._registry.nodes[computes].info.name)
        remote_prefixes = {}
        for node, (pool, tokens) in self._cached_prefixes.find_remote_prefixes(
            record.prompt_block_hashes, _chosen_nodes(choice)
        ).items():
            cached_here = demand.cached_tokens_on(node)
            remote_prefixes[node] = RemotePrefix(
                pool.address,
                tokens,
                cost.prefill_seconds(tokens - cached_here, cached_here) / (tokens - cached_here),
            )
        return remote_prefixes

    def list_considered(self, decision: PlacementDecision) -> tuple[ConsideredNode, ...]:
        """Return the candidates of every role that the decision chose nodes for."""
        is_site_chosen = decision.rejected_prediction is not None
        roles = tuple(Role) if is_site_chosen else decision.demand.required_roles
        return tuple(one for role in roles for one in _rank_candidates(decision, role))

    def _candidate_views(
        self, record: PlaceableRequest, in_service: Sequence[NodeView]
    ) -> Sequence[NodeView]:
        """Return the nodes in service; for a probe, its node is the only one of its role."""
        if record.probe_node is None:
            return in_service
        node = self._registry.nodes.get(record.probe_node)
        if node is None:
            return []
        return [
            *(view for view in in_service if view.role is not node.info.role),
            self._loads.get_view(node),
        ]

    def _node_name(self, node: Incarnation | None) -> NodeName | None:
        return self._registry.nodes[node].info.name if node is not None else None

    def _can_prefill(self, record: PlaceableRequest) -> bool:
        """Return whether a prefill node in service, or the one that is probed, can hold the
        context."""
        tokens = record.context_tokens + 1
        probed = self._registry.nodes.get(record.probe_node) if record.probe_node else None
        if probed is not None and probed.info.role is Role.PREFILL:
            return probed.max_context_tokens >= tokens
        return self._capacity.can_fit_context(Role.PREFILL, tokens)

    def _fixed_reason(self, demand: PlacementDemand) -> PlacementReason:
        """Return why the prompt is computed where the demand says."""
        if self._mode == "colocated" or demand.needs_prefill:
            return PlacementReason.MODE
        if DegradationStep.LOCAL_PREFILL_ONLY in self._degradation.active_steps:
            return PlacementReason.DEGRADED
        return (
            PlacementReason.PREFILL_TOO_SMALL
            if self._registry.has_serving_node(Role.PREFILL)
            else PlacementReason.NO_PREFILL_NODE
        )

    def _cached_by_node(self, record: PlaceableRequest) -> dict[Incarnation, int]:
        """Look the prompt up in the directory. With prompt logprobs no cache may be used."""
        if record.awaits_prompt_logprobs:
            return {}
        if record.prompt_block_hashes is None:
            record.prompt_block_hashes = self._cached_prefixes.hash_prompt(record.request)
        return self._cached_prefixes.cached_tokens_by_node(record.prompt_block_hashes)


def _chosen_nodes(choice: NodeChoice) -> Iterator[Incarnation]:
    return filter(None, (choice.decode, choice.prefill))


MAX_CONSIDERED = 16  # candidates recorded for each role; the chosen ones are always among them


def _rank_candidates(decision: PlacementDecision, role: Role) -> Iterator[ConsideredNode]:
    """Yield the candidates of a role: the chosen one first, then the fastest by prediction."""
    demand, scores = decision.demand, decision.choice.predicted_seconds
    chosen = {decision.choice.prefill, decision.choice.decode}
    ranked = [
        (view.incarnation not in chosen, scores.get(view.incarnation, math.inf), number)
        for number, view in enumerate(decision.views)
        if view.role is role
    ]
    ranked.sort()
    for _, _, number in ranked[:MAX_CONSIDERED]:
        view = decision.views[number]
        yield ConsideredNode(
            node=view.name,
            role=view.role,
            attempts=view.attempts,
            uncomputed_tokens=view.uncomputed_tokens,
            free_blocks=view.free_blocks,
            is_eligible=view.can_accept(demand),
            is_chosen=view.incarnation in chosen,
            cached_tokens=demand.cached_tokens_on(view.incarnation),
            predicted_seconds=scores.get(view.incarnation),
            objection=_objection_to(decision, view),
        )


def _objection_to(decision: PlacementDecision, view: NodeView) -> str:
    choice, mine = decision.choice, view.incarnation
    pair = (mine, choice.decode) if view.role is Role.PREFILL else (choice.prefill, mine)
    if pair in decision.blocked_pairs:
        return BLOCKED_PAIR
    if mine in decision.demand.avoided_nodes:
        return FAILED_BEFORE
    return (
        RAMPING_UP if mine in choice.predicted_seconds and is_ramping_up(view, decision.now) else ""
    )
