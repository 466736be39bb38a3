"""A node's own gRPC port: standard health, and reflection."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config import Config
from baton.errors import ConfigError

NO_PORT = -1  # as --health-port: none


class HealthPort:
    """Serving from `start` to `stop`; grpc ends a server that nobody holds on to."""

    def __init__(self, config: Config) -> None:
        self.port = NO_PORT
        self._where = f"{config.listen.rpartition(':')[0]}:{config.health_port}"
        self._wanted = config.health_port != NO_PORT
        self._servicer = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Raises ConfigError when the port cannot be had."""
        if not self._wanted:
            return
        server = self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            self.port = server.add_insecure_port(self._where)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {self._where}: choose another --health-port, 0 for any, {NO_PORT} for none",
                param="health_port",
            ) from None
        await server.start()
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    async def leaving(self) -> None:
        """Health checks hear of the end before it comes."""
        await self._servicer.enter_graceful_shutdown()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
