"""What operators can read and change, behind the Cluster service and the admin port."""

import math
from collections.abc import AsyncGenerator

from prometheus_client import generate_latest

from baton.cluster_link.messages import ArmFailpoints
from baton.config.coordinator_config import MAX_SECONDS, CoordinatorConfig
from baton.errors import BatonError, InvalidRequest, NotFound, NotSupported
from baton.pb import cluster_pb2 as pb
from baton.process import log
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.role_split import RoleSplit
from baton.slo import Slo
from baton.types import NodeName, RequestId
from baton.version import package_version
from coordinator.node_links.cluster_readiness import ClusterReadiness
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.node_links.ledger_collector import LedgerCollector
from coordinator.operators.client_ids import ClientIds, parse_request_id
from coordinator.operators.degradation_view import degradation_to_pb, list_notices
from coordinator.operators.member_view import (
    drain_response_to_pb,
    node_status_to_pb,
    pool_status_to_pb,
)
from coordinator.operators.metrics import CoordinatorMetrics
from coordinator.operators.ratio_view import advice_to_pb, ratio_to_pb
from coordinator.operators.status_watchers import StatusWatchers

COORDINATOR = "coordinator"  # the name by which failpoints address this process

_log = log.get_logger("operations")


class ClusterOperations:
    """The operators' view of the cluster. Runs on the coordinator's event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        dispatcher: Dispatcher,
        ledgers: LedgerCollector,
        readiness: ClusterReadiness,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._ledger_collector = ledgers
        self._readiness = readiness
        self._metrics = metrics
        self.client_request_ids = ClientIds()
        self._watchers = StatusWatchers(self.get_status)
        dispatcher.on_cluster_change.append(self._watchers.notify_change)
        dispatcher.on_request_end.append(lambda _: self._watchers.notify_change())

    def get_status(self) -> pb.StatusResponse:
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        ready, reason = self._readiness.state()
        nodes = sorted(brain.node_registry.nodes.values(), key=lambda node: node.info.name)
        pools = sorted(
            brain.placement_state.pools.members.values(), key=lambda pool: pool.info.name
        )
        return pb.StatusResponse(
            ready=ready,
            reason=reason,
            mode=self._dispatcher.mode,
            model=self._config.public_model_name,
            queued=brain.queued_requests,
            running=brain.running_requests,
            nodes=[node_status_to_pb(brain, node, now) for node in nodes]
            + [pool_status_to_pb(pool, now) for pool in pools],
            counters=self._metrics.get_counter_values(),
            clock_seconds=now,
            latency=self._metrics.get_latency_summary(),
            version=package_version(),
            ratio=self.get_ratio(),
            notices=list_notices(brain),
            degradation=degradation_to_pb(brain.degradation, now),
            pressure=brain.degradation.last_sample.pressure or 0.0,
        )

    async def collect_ledgers(self) -> pb.LedgerResponse:
        return await self._ledger_collector.collect_ledgers()

    def render_metrics(self) -> bytes:
        return generate_latest(self._metrics.registry)

    def explain_request(self, request: str) -> pb.ExplainResponse:
        """Explain a request by its id, with or without the prefix in responses, or its client's id.

        Raises NotFound, or InvalidRequest if several requests have that client's id.
        """
        try:
            return self._explain_by_id(parse_request_id(request))
        except NotFound:
            found = self.client_request_ids.find_request(request)
            if found is None:
                raise
            return self._explain_by_id(found)

    def drain_node(self, name: str, timeout: float | None) -> pb.DrainResponse:
        """Returns at once; see `Brain.drain_node`. Raises NotFound, InvalidRequest."""
        _check_seconds("timeout", timeout)
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.drain_node(NodeName(name), timeout, now))
        _log.info("drain started", node=name, timeout=timeout)
        self._dispatcher.notify_cluster_change()
        return drain_response_to_pb(self._dispatcher.brain, name)

    def undrain_node(self, name: str) -> pb.DrainResponse:
        """Raises NotFound."""
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.undrain_node(NodeName(name), now))
        _log.info("node back in service", node=name)
        self._dispatcher.notify_cluster_change()
        return drain_response_to_pb(self._dispatcher.brain, name)

    def get_ratio(self) -> pb.Ratio:
        return ratio_to_pb(self._dispatcher.brain, self._dispatcher.clock())

    def set_ratio(self, target: RoleSplit, flip_timeout: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.set_ratio`. Raises InvalidRequest."""
        _check_seconds("flip_timeout", flip_timeout)
        seconds = self._config.flip_timeout if flip_timeout is None else flip_timeout
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.set_ratio(target, seconds, now))
        _log.info("ratio set", target=str(target), flip_timeout=seconds)
        self._dispatcher.notify_cluster_change()
        return self.get_ratio()

    def advise_ratio(self, slo: Slo | None) -> pb.RatioAdvice:
        """See `RatioController.get_advice`. Raises ServiceUnavailable, InvalidRequest."""
        brain = self._dispatcher.brain
        return advice_to_pb(
            brain.ratio_controller.get_advice(slo, self._dispatcher.clock()), brain.queued_requests
        )

    def set_auto_ratio(self, slo: Slo | None, flip_timeout: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.set_auto_ratio`. Raises InvalidRequest."""
        _check_seconds("flip_timeout", flip_timeout)
        seconds = self._config.flip_timeout if flip_timeout is None else flip_timeout
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.set_auto_ratio(slo, seconds, now))
        _log.info(
            "automatic ratio enabled",
            slo=str(brain.ratio_controller.target_slo),
            flip_timeout=seconds,
        )
        self._dispatcher.notify_cluster_change()
        return self.get_ratio()

    def set_manual_ratio(self) -> pb.Ratio:
        self._dispatcher.brain.set_manual_ratio()
        _log.info("automatic ratio disabled")
        self._dispatcher.notify_cluster_change()
        return self.get_ratio()

    def arm_failpoints(self, prefix: str, spec: str) -> int:
        """Replace the armed failpoints of every process whose name starts with `prefix`.

        Returns the number of those processes. Raises NotSupported without --failpoints-rpc, and
        InvalidRequest for a malformed spec.
        """
        if not self._config.failpoints_rpc:
            raise NotSupported(
                "failpoints cannot be armed: the cluster runs without --failpoints-rpc"
            )
        try:
            Failpoints(spec)
        except BatonError as error:
            raise InvalidRequest(error.message, param="spec") from None
        members = self._dispatcher.brain.list_members()
        nodes = [member for member in members if member.info.name.startswith(prefix)]
        for node in nodes:
            self._dispatcher.node_connections[node.incarnation].send_order(ArmFailpoints(spec))
        if COORDINATOR.startswith(prefix):
            FAILPOINTS.arm(spec)
        return len(nodes) + COORDINATOR.startswith(prefix)

    def watch_status(self, interval: float) -> AsyncGenerator[pb.StatusResponse, None]:
        """See `StatusWatchers.watch_status`."""
        return self._watchers.watch_status(interval)

    def close(self) -> None:
        """End all watches of the status."""
        self._watchers.close()

    def _explain_by_id(self, request: RequestId) -> pb.ExplainResponse:
        """Raises NotFound."""
        return self._dispatcher.brain.explain_request(request, self._dispatcher.clock())


def _check_seconds(param: str, seconds: float | None) -> None:
    """Raises InvalidRequest."""
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(
            f"{param}_seconds is {seconds:g}: it must be 0 to {MAX_SECONDS:g}", param=param
        )
