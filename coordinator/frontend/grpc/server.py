"""The client-facing gRPC port: services, standard health, reflection, and explicit sizes."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from baton.limits import MAX_BODY_BYTES
from baton.network.connection_limits import PortLimit
from baton.network.grpc_bind import bind_grpc_port
from baton.network.grpc_options import grpc_server_options
from baton.network.health_service import add_health_service
from baton.pb import cluster_pb2, generation_pb2
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.grpc.generation_service import GenerationService
from coordinator.frontend.grpc.handlers import ServiceMethods, add_service_handlers
from coordinator.frontend.request_intake import RequestIntake
from coordinator.readiness import Readiness

_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
_CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"]
_SERVICES = (_GENERATION.full_name, _CLUSTER.full_name)
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", MAX_BODY_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    # Requests of a client whose machine has died are cancelled after about this time.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients that ping more often are disconnected.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
_MAX_CALLS_PER_CONNECTION = 1024  # concurrent calls


class GrpcServer:
    """The gRPC server for clients, with the Generation and health services.

    `add_cluster_service` adds the service that operators use; call it before `start`.
    """

    def __init__(
        self,
        intake: RequestIntake,
        readiness: Readiness,
        client_auth: ClientAuthenticator,
        limit: PortLimit,
    ) -> None:
        self.server = grpc.aio.server(
            options=(*_OPTIONS, *grpc_server_options(limit, streams=_MAX_CALLS_PER_CONNECTION))
        )
        self.port = 0
        self._health = add_health_service(self.server, *_SERVICES)
        self._readiness_changes: asyncio.Queue[bool] = asyncio.Queue()
        self._health_task: asyncio.Task[None] | None = None
        add_service_handlers(
            self.server,
            _GENERATION,
            GenerationService(intake, client_auth),
            intake.body_budgets.grpc_budget,
        )
        self._readiness = readiness
        readiness.on_change.append(lambda ready, _: self._readiness_changes.put_nowait(ready))

    def add_cluster_service(self, service: ServiceMethods) -> None:
        add_service_handlers(self.server, _CLUSTER, service)

    def bind(self, host: str, port: int) -> None:
        """Listen on `port`; 0 picks a free port. Raises ConfigError."""
        self.port = bind_grpc_port(self.server, host, port, "--grpc-port")

    async def start(self) -> None:
        await self._set_health(self._readiness.state()[0])  # before the first caller can ask
        self._health_task = asyncio.create_task(self._follow_readiness(), name="grpc health")
        await self.server.start()

    async def set_not_serving(self) -> None:
        """Make health checks fail, for good, before anything else stops."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float) -> None:
        """Refuse new calls and let open ones end within `grace` seconds."""
        await self.set_not_serving()
        if self._health_task is not None:
            self._health_task.cancel()
        await self.server.stop(grace)

    async def _follow_readiness(self) -> None:
        while True:
            await self._set_health(await self._readiness_changes.get())

    async def _set_health(self, ready: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for service in ("", *_SERVICES):
            await self._health.set(service, response.SERVING if ready else response.NOT_SERVING)
