"""Gives advice on the ratio, and changes it automatically if an operator asks for that."""

from dataclasses import dataclass

from baton.errors import InvalidRequest, ServiceUnavailable
from baton.role_split import RoleSplit
from baton.slo import Slo
from baton.types import Role
from coordinator.core.estimates.workload import (
    RequestShape,
    SloResults,
    StageSeconds,
    WorkloadSummary,
)
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.ratio.advisor import RatioAdvice, compute_advice
from coordinator.core.ratio.planner import MIN_REQUESTS, ClusterSnapshot, RatioPlanner
from coordinator.core.ratio.role_switcher import RoleSwitcher
from coordinator.core.ratio.split_forecast import NodeProfile, SplitForecaster
from coordinator.core.requests.record import RequestState
from coordinator.core.requests.table import RequestTable

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
    def __init__(
        self, registry: NodeRegistry, table: RequestTable, switches: RoleSwitcher, slo: Slo
    ) -> None:
        """`slo` is the default objective."""
        self.change_count = 0  # changes of the ratio so far
        self._registry = registry
        self._table = table
        self._placement_state = table.placement_state
        self._role_switcher = switches
        self._default_slo = slo
        self._planner: RatioPlanner | None = None
        self._drain_timeout = 0.0

    # what operators ask

    def get_advice(self, slo: Slo | None, now: float) -> RatioReport:
        """Return advice. Raises ServiceUnavailable while there are too few requests, and
        InvalidRequest without both roles."""
        objective = slo or self.target_slo
        candidates, machine = self._candidate_splits(now), self._node_profile()
        if not candidates or machine is None:
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
        forecaster = SplitForecaster(workload, machine, objective)
        advice = compute_advice(
            forecaster, candidates, self._role_switcher.projected_split(now), objective
        )
        meter = self._placement_state.workload_meter
        service, stages = (
            meter.compute_slo_results(objective, ADVICE_WINDOW, now),
            meter.compute_mean_stages(ADVICE_WINDOW, now),
        )
        return RatioReport(advice, workload, service, stages, self._waiting_by_role())

    def enable_auto(self, slo: Slo | None, patience: float, now: float) -> None:
        """Change the ratio to keep the SLO; switching nodes get `patience` seconds to finish their
        work."""
        self._planner = RatioPlanner(slo or self._default_slo, now)
        self._drain_timeout = patience

    def disable_auto(self) -> None:
        """Stop changing the ratio. Idempotent. Pending role switches continue."""
        self._planner = None

    # time

    def adjust_if_due(self, now: float) -> RoleSplit | None:
        """Evaluate the ratio if that is due; return the new one if it was changed."""
        if self._planner is None or self._planner.next_evaluation_at > now:
            return None
        machine = self._node_profile()
        if machine is None:
            self._planner.skip_evaluation("no node is here", now)
            return None
        heading, moving = self._role_switcher.projected_split(now), len(self._role_switcher.pending)
        sight = ClusterSnapshot(
            heading, moving, self._candidate_splits(now), machine, self._queued_shapes()
        )
        wanted = self._planner.choose_split(sight, self._placement_state.workload_meter, now)
        if wanted is not None:
            self._role_switcher.set_target(wanted, self._drain_timeout, now)
            self.change_count += 1
        return wanted

    def next_evaluation_at(self) -> float | None:
        return self._planner.next_evaluation_at if self._planner else None

    # views

    @property
    def is_automatic(self) -> bool:
        return self._planner is not None

    @property
    def target_slo(self) -> Slo:
        """The SLO that is kept, or would be."""
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

    def _candidate_splits(self, now: float) -> list[RoleSplit]:
        return [
            split for split in self._role_switcher.list_possible_splits(now) if split.prefill_nodes
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
        waiting = [
            record for record in self._table.records.values() if record.state is RequestState.QUEUED
        ]
        return [
            (
                record.timestamps.arrival,
                RequestShape(
                    len(record.request.prompt_token_ids),
                    self._placement_state.expected_output_tokens(record.request),
                ),
            )
            for record in waiting
            if not record.is_internal
        ]

    def _waiting_by_role(self) -> dict[Role, int]:
        found = dict.fromkeys(Role, 0)
        for node in self._registry.nodes.values():
            found[node.info.role] += node.stats.waiting if node.stats else 0
        return found
