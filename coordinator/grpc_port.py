"""The client-facing gRPC port: services, standard health, reflection, and explicit sizes."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from baton.connection_limits import PortLimit
from baton.errors import ConfigError
from baton.grpc_limits import server_options
from baton.health_service import add_health
from baton.limits import MAX_BODY_BYTES
from baton.pb import cluster_pb2, generation_pb2
from coordinator.auth import Clients
from coordinator.grpc_front import GenerationService
from coordinator.grpc_handlers import Methods, add_handlers
from coordinator.intake import Intake
from coordinator.readiness import Readiness

_GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"]
_CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"]
_SERVICES = (_GENERATION.full_name, _CLUSTER.full_name)
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", MAX_BODY_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 30_000),  # a client whose machine is gone holds its requests no longer than this
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # clients may ping as often without being cut off
)
_STREAMS = 1024  # calls at a time on one connection


class GrpcPort:
    """`add_cluster` before `start`."""

    def __init__(self, intake: Intake, readiness: Readiness, who: Clients, limit: PortLimit) -> None:
        self.server = grpc.aio.server(options=(*_OPTIONS, *server_options(limit, streams=_STREAMS)))
        self.port = 0
        self._health = add_health(self.server, *_SERVICES)
        self._changed: asyncio.Queue[bool] = asyncio.Queue()
        self._following: asyncio.Task[None] | None = None
        add_handlers(self.server, _GENERATION, GenerationService(intake, who), intake.bodies.grpc)
        self._readiness = readiness
        readiness.on_change.append(lambda ready, _: self._changed.put_nowait(ready))

    def add_cluster(self, service: Methods) -> None:
        add_handlers(self.server, _CLUSTER, service)

    def bind(self, host: str, port: int) -> None:
        """Port 0 picks a free one. Raises ConfigError."""
        self.port = bind_grpc(self.server, host, port, "--grpc-port")

    async def start(self) -> None:
        await self._tell(self._readiness.state()[0])  # before the first caller can ask
        self._following = asyncio.create_task(self._follow(), name="grpc health")
        await self.server.start()

    async def not_serving(self) -> None:
        """Health checks hear of the end before anything else does; nothing takes it back."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float) -> None:
        """Take no new call, let open ones end within `grace` seconds."""
        await self.not_serving()
        if self._following is not None:
            self._following.cancel()
        await self.server.stop(grace)

    async def _follow(self) -> None:
        while True:
            await self._tell(await self._changed.get())

    async def _tell(self, ready: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        for service in ("", *_SERVICES):
            await self._health.set(service, kinds.SERVING if ready else kinds.NOT_SERVING)


def bind_grpc(
    server: grpc.aio.Server, host: str, port: int, flag: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """The port that the server will listen on, in plain text without `credentials`; 0 picks a free one. Raises
    ConfigError naming the flag."""
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(server.add_secure_port(target, credentials) if credentials else server.add_insecure_port(target))
    except RuntimeError:
        raise ConfigError(f"cannot listen on {target}: choose another {flag}, 0 for any") from None
