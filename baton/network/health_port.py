"""A node's gRPC port for the standard health service and reflection."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2

from baton.config.common import MemberConfig
from baton.errors import ConfigError
from baton.network.connection_guard import ConnectionGuard
from baton.network.connection_limits import compute_port_limit
from baton.network.grpc_options import grpc_server_options
from baton.network.health_service import MAX_STREAMS, BoundedHealthServicer, add_health_service
from baton.process.descriptors import get_descriptor_limit

NO_PORT = -1  # value of --health-port for no port


class HealthPort:
    """Serves health from `start` to `stop`.

    Keeps a reference to the server: gRPC stops a server that is garbage collected.
    """

    def __init__(self, config: MemberConfig) -> None:
        self.port = NO_PORT
        self._guard = ConnectionGuard()
        self._endpoint = f"{config.listen.rpartition(':')[0]}:{config.health_port}"
        self._is_enabled = config.health_port != NO_PORT
        self._limit = compute_port_limit(
            "health", get_descriptor_limit(), per_address=config.max_connections_per_address
        )
        self._servicer: BoundedHealthServicer | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen on the port. Raises ConfigError if it cannot be bound."""
        if not self._is_enabled:
            return
        server = self._server = grpc.aio.server(
            options=grpc_server_options(self._limit, streams=MAX_STREAMS)
        )
        self._servicer = add_health_service(server)
        try:
            self.port = server.add_insecure_port(self._endpoint)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {self._endpoint}: choose another --health-port, "
                f"0 for any, {NO_PORT} for none",
                param="health_port",
            ) from None
        await server.start()
        self._guard.watch_port("health", self.port, self._limit)
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    async def announce_shutdown(self) -> None:
        """Answer health checks with NOT_SERVING from now on."""
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
        await asyncio.to_thread(self._guard.close)
