"""A node's own gRPC port: standard health, and reflection."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2

from baton.config import Config
from baton.connection_guard import ConnectionGuard
from baton.connection_limits import port_limit
from baton.descriptors import descriptor_limit
from baton.errors import ConfigError
from baton.grpc_limits import server_options
from baton.health_service import STREAMS, BoundedHealth, add_health

NO_PORT = -1  # as --health-port: none


class HealthPort:
    """Serving from `start` to `stop`; grpc ends a server that nobody holds on to."""

    def __init__(self, config: Config) -> None:
        self.port = NO_PORT
        self._guard = ConnectionGuard()
        self._where = f"{config.listen.rpartition(':')[0]}:{config.health_port}"
        self._wanted = config.health_port != NO_PORT
        self._limit = port_limit("health", descriptor_limit(), per_address=config.max_connections_per_address)
        self._servicer: BoundedHealth | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Raises ConfigError when the port cannot be had."""
        if not self._wanted:
            return
        server = self._server = grpc.aio.server(options=server_options(self._limit, streams=STREAMS))
        self._servicer = add_health(server)
        try:
            self.port = server.add_insecure_port(self._where)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {self._where}: choose another --health-port, 0 for any, {NO_PORT} for none",
                param="health_port",
            ) from None
        await server.start()
        self._guard.watch("health", self.port, self._limit)
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    async def leaving(self) -> None:
        """Health checks hear of the end before it comes."""
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
        await asyncio.to_thread(self._guard.close)
