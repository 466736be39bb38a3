"""The cluster port, to which nodes and pools connect: mutual TLS, one stream a connection."""

from typing import Any

import grpc.aio

from baton.cluster_link import stream
from baton.config.coordinator_config import CoordinatorConfig
from baton.network.cluster_certificates import coordinator_server_credentials
from baton.network.connection_limits import PortLimit
from baton.network.grpc_bind import bind_grpc_port
from baton.network.grpc_options import LINK_CHANNEL_OPTIONS, grpc_server_options
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.node_links.handshake_monitor import STREAM_OPEN_TIMEOUT_SECONDS, HandshakeMonitor
from coordinator.node_links.ledger_collector import LedgerCollector
from coordinator.node_links.node_link_service import NodeLinkService

_MAX_STREAMS_PER_CONNECTION = 4  # concurrent; a node has one
_IDLE_SECONDS = 60.0  # after which a connection without a stream is closed


class NodeLinkServer:
    """The gRPC server for nodes, on the running event loop. It answers from `start` on."""

    def __init__(
        self,
        config: CoordinatorConfig,
        dispatcher: Dispatcher,
        ledgers: LedgerCollector,
        limit: PortLimit,
    ) -> None:
        """Bind the port. Raises ConfigError."""
        self._join_counts = dispatcher.brain.counters.joins
        self._link_service = NodeLinkService(config, dispatcher, ledgers)
        self._handshake_monitor = HandshakeMonitor(
            self._count_failed_handshakes, STREAM_OPEN_TIMEOUT_SECONDS
        )
        options = grpc_server_options(
            limit, streams=_MAX_STREAMS_PER_CONNECTION, idle=_IDLE_SECONDS
        )
        self._server = grpc.aio.server(options=(*LINK_CHANNEL_OPTIONS, *options))
        stream.add_link_service(self._server, self._attach)
        credentials = coordinator_server_credentials(
            config.cluster_token, self._handshake_monitor.on_handshake_started
        )
        self.port = bind_grpc_port(
            self._server, config.cluster_host, config.cluster_port, "--cluster-port", credentials
        )

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
        self._handshake_monitor.close()

    async def _attach(self, requests: object, context: Any) -> None:
        self._handshake_monitor.on_stream_opened()
        await self._link_service.Attach(requests, context)

    def _count_failed_handshakes(self, failed: int) -> None:
        self._join_counts["unauthenticated"] += failed
