"""Gives advice on the ratio, and changes it automatically if an operator asks for that."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import InvalidRequest, ServiceUnavailable
from baton.role_split import RoleSplit
from baton.slo import Slo
from baton.types import RequestId, Role
from coordinator.core.common.effects import EffectLog, RatioChanged
from coordinator.core.estimates.workload import (
    RequestShape,
    SloResults,
    StageSeconds,
    WorkloadSummary,
)
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.placement_state import PlacementState
from coordinator.core.ratio.advisor import RatioAdvice, compute_advice
from coordinator.core.ratio.planner import MIN_REQUESTS, ClusterSnapshot, RatioPlanner
from coordinator.core.ratio.role_switcher import RoleSwitcher
from coordinator.core.ratio.split_forecast import NodeProfile, SplitForecaster
from coordinator.core.requests.record import RequestRecord, RequestState

MANUAL_REASON = "manual: it changes when an operator says so"
ADVICE_WINDOW = 60.0  # seconds of demand on which advice is based


@dataclass(frozen=True, slots=True)
class RatioReport:
    """Advice, with the measurements that it is based on."""

    advice: RatioAdvice
    workload: WorkloadSummary
    slo_results: SloResults
    stage_seconds: StageSeconds
    waiting_by_role: dict[Role, int]  # requests that nodes of a role have not begun


class RatioController:
    """Advises on the ratio; in automatic mode a `RatioPlanner` chooses it and this changes it."""

    def __init__(
        self,
        registry: NodeRegistry,
        records: Mapping[RequestId, RequestRecord],
        placement_state: PlacementState,
        role_switcher: RoleSwitcher,
        effects: EffectLog,
        default_slo: Slo,
    ) -> None:
        """`default_slo` is kept unless an operator names another."""
        self.change_count = 0  # changes of the ratio so far
        self._registry = registry
        self._records = records
        self._placement_state = placement_state
        self._role_switcher = role_switcher
        self._effects = effects
        self._default_slo = default_slo
        self._planner: RatioPlanner | None = None
        self._drain_timeout = 0.0

    # operators

    def get_advice(self, slo: Slo | None, now: float) -> RatioReport:
        """Return advice. Raises ServiceUnavailable while there are too few requests, and
        InvalidRequest without both roles."""
        objective = slo or self.target_slo
        candidates, profile = self._candidate_splits(), self._node_profile()
        if not candidates or profile is None:
            raise InvalidRequest("a ratio needs at least one prefill node and one decode node")
        workload = self._placement_state.workload_meter.summarize_workload(
            ADVICE_WINDOW, now, self._queued_shapes()
        )
        if workload is None or len(workload.requests) < MIN_REQUESTS:
            count = len(workload.requests) if workload else 0
            raise ServiceUnavailable(
                f"{count} requests came in the last {ADVICE_WINDOW:g} s: advice needs"
                f" {MIN_REQUESTS} at least",
                retry_after=ADVICE_WINDOW,
            )
        forecaster = SplitForecaster(workload, profile, objective)
        advice = compute_advice(
            forecaster, candidates, self._role_switcher.roles.projected_split(), objective
        )
        meter = self._placement_state.workload_meter
        return RatioReport(
            advice,
            workload,
            meter.compute_slo_results(objective, ADVICE_WINDOW, now),
            meter.compute_mean_stages(ADVICE_WINDOW, now),
            self._waiting_by_role(),
        )

    def enable_auto(self, slo: Slo | None, drain_timeout: float, now: float) -> None:
        """Change the ratio to keep the SLO; switching nodes get `drain_timeout` seconds to finish
        their work."""
        self._planner = RatioPlanner(slo or self._default_slo, now)
        self._drain_timeout = drain_timeout

    def disable_auto(self) -> None:
        """Stop changing the ratio. Idempotent. Pending role switches continue."""
        self._planner = None

    # timer

    def adjust_if_due(self, now: float) -> None:
        """Evaluate the ratio if that is due, and change it if the planner says so."""
        if self._planner is None or self._planner.next_evaluation_at > now:
            return
        profile = self._node_profile()
        if profile is None:
            self._planner.skip_evaluation("no node is here", now)
            return
        snapshot = ClusterSnapshot(
            self._role_switcher.roles.projected_split(),
            len(self._role_switcher.pending),
            self._candidate_splits(),
            profile,
            self._queued_shapes(),
        )
        split = self._planner.choose_split(snapshot, self._placement_state.workload_meter, now)
        if split is not None:
            self._role_switcher.set_target(split, self._drain_timeout)
            self.change_count += 1
            self._effects.append_effect(RatioChanged(split, self.reason))

    def next_evaluation_at(self) -> float | None:
        return self._planner.next_evaluation_at if self._planner else None

    # views

    @property
    def is_automatic(self) -> bool:
        return self._planner is not None

    @property
    def target_slo(self) -> Slo:
        """The SLO of automatic mode, or the default one in manual mode."""
        return self._planner.target_slo if self._planner else self._default_slo

    @property
    def reason(self) -> str:
        return self._planner.reason if self._planner else MANUAL_REASON

    def get_slo_results(self, now: float) -> SloResults:
        """Return the SLO results of the last minute."""
        return self._placement_state.workload_meter.compute_slo_results(
            self.target_slo, ADVICE_WINDOW, now
        )

    # inside

    def _candidate_splits(self) -> list[RoleSplit]:
        return [
            split
            for split in self._role_switcher.roles.list_possible_splits()
            if split.prefill_nodes
        ]

    def _node_profile(self) -> NodeProfile | None:
        """Return the common profile of all nodes."""
        infos = [node.info for node in self._registry.nodes.values()]
        if not infos:
            return None
        costs, layout = self._placement_state.cost_model, infos[0].layout
        return NodeProfile(
            costs.fleet_costs,
            max_num_seqs=min(info.max_num_seqs for info in infos),
            cache_tokens=min(info.num_blocks for info in infos) * layout.block_size,
            transfer_costs=costs.fleet_transfer_costs(layout.token_bytes),
        )

    def _queued_shapes(self) -> list[tuple[float, RequestShape]]:
        """Return the arrival times and shapes of the clients' requests that are queued."""
        queued = [
            record for record in self._records.values() if record.state is RequestState.QUEUED
        ]
        return [
            (
                record.timestamps.arrival,
                RequestShape(
                    len(record.request.prompt_token_ids),
                    self._placement_state.output_lengths.predict_tokens(
                        record.request.principal.tenant, record.request.sampling.max_tokens
                    ),
                ),
            )
            for record in queued
            if not record.is_internal
        ]

    def _waiting_by_role(self) -> dict[Role, int]:
        waiting = dict.fromkeys(Role, 0)
        for node in self._registry.nodes.values():
            waiting[node.info.role] += node.stats.waiting if node.stats else 0
        return waiting
