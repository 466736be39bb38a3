"""What operators can read and change, behind the Cluster service and the admin port."""

from collections.abc import AsyncGenerator

from prometheus_client import generate_latest

from baton.cluster_link.messages import ArmFailpoints
from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import BatonError, InvalidRequest, NotSupported
from baton.pb import cluster_pb2 as pb
from baton.process import log
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.types import NodeName
from coordinator.node_links.cluster_readiness import ClusterReadiness
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.node_links.ledger_collector import LedgerCollector
from coordinator.operators.client_ids import ClientIds, explain_by_name
from coordinator.operators.metrics import CoordinatorMetrics
from coordinator.operators.ratio_operations import RatioOperations, check_seconds
from coordinator.operators.status_view import StatusView, drain_response_to_pb
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
        self._metrics = metrics
        self.ratio = RatioOperations(config, dispatcher)
        self._status_view = StatusView(config, dispatcher, readiness, metrics, self.ratio)
        self.client_request_ids = ClientIds()
        self._watchers = StatusWatchers(self.get_status)
        dispatcher.on_cluster_change.append(self._watchers.notify_change)
        dispatcher.on_request_end.append(lambda _: self._watchers.notify_change())

    def get_status(self) -> pb.StatusResponse:
        return self._status_view.build_status()

    async def collect_ledgers(self) -> pb.LedgerResponse:
        return await self._ledger_collector.collect_ledgers()

    def render_metrics(self) -> bytes:
        return generate_latest(self._metrics.registry)

    def explain_request(self, request: str) -> pb.ExplainResponse:
        """Explain a request by its id, with or without the prefix in responses, or its client's id.

        Raises NotFound, or InvalidRequest if several requests have that client's id.
        """
        dispatcher = self._dispatcher
        return explain_by_name(
            dispatcher.brain, self.client_request_ids, request, dispatcher.clock()
        )

    def drain_node(self, name: str, timeout: float | None) -> pb.DrainResponse:
        """Returns at once; see `Brain.drain_node`. Raises NotFound, InvalidRequest."""
        check_seconds("timeout", timeout)
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.drain_node(NodeName(name), timeout, now))
        _log.info("drain started", node=name, timeout=timeout)
        self._dispatcher.notify_cluster_change()
        return drain_response_to_pb(brain, name)

    def undrain_node(self, name: str) -> pb.DrainResponse:
        """Raises NotFound."""
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.undrain_node(NodeName(name), now))
        _log.info("node back in service", node=name)
        self._dispatcher.notify_cluster_change()
        return drain_response_to_pb(brain, name)

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
