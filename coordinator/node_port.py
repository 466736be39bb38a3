"""The cluster port, where nodes and pools dial: mutual TLS, and one stream a connection."""

from typing import Any

import grpc.aio

from baton import link_codec
from baton.cluster_certificates import coordinator_credentials
from baton.config import Config
from baton.connection_limits import PortLimit
from baton.grpc_limits import server_options
from baton.limits import LINK_OPTIONS
from coordinator.dispatcher import Dispatcher
from coordinator.grpc_port import bind_grpc
from coordinator.handshakes import PATIENCE, Handshakes
from coordinator.ledgers import Ledgers
from coordinator.node_link import NodeLink

_STREAMS = 4  # at a time on one connection: a node has one
_IDLE_SECONDS = 60.0  # without a stream


class NodePort:
    """Bound by its constructor, on the running event loop; it answers from `start` on."""

    def __init__(self, config: Config, dispatcher: Dispatcher, ledgers: Ledgers, limit: PortLimit) -> None:
        """Raises ConfigError when the port cannot be had."""
        self._joins = dispatcher.brain.counters.joins
        self._link = NodeLink(config, dispatcher, ledgers)
        self._handshakes = Handshakes(self._count_failures, PATIENCE)
        options = server_options(limit, streams=_STREAMS, idle=_IDLE_SECONDS)
        self._server = grpc.aio.server(options=(*LINK_OPTIONS, *options))
        link_codec.add_to(self._server, self._attach)
        credentials = coordinator_credentials(config.cluster_token, self._handshakes.begin)
        self.port = bind_grpc(self._server, config.cluster_host, config.cluster_port, "--cluster-port", credentials)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
        self._handshakes.close()

    async def _attach(self, requests: object, context: Any) -> None:
        self._handshakes.complete()
        await self._link.Attach(requests, context)

    def _count_failures(self, failed: int) -> None:
        self._joins["unauthenticated"] += failed
