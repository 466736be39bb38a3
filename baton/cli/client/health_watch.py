"""Waiting for a gRPC service to be healthy: one Watch stream, no polling."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

GENERATION_SERVICE = "baton.v1.Generation"
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # which is how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", 250),
)
# The coordinator is not there yet, or was restarted while we watched.
_TRANSIENT_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


async def wait_until_serving(endpoint: str, service: str = GENERATION_SERVICE) -> None:
    """Return when `service` at `endpoint` says SERVING. Waits for ever; bound it with
    asyncio.timeout.

    Raises grpc.aio.AioRpcError when the endpoint answers with anything but patience.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    async with grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(request, wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() not in _TRANSIENT_CODES:
                    raise
