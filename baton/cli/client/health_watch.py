"""Wait for a gRPC service to become healthy, with one Watch stream instead of polling."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

GENERATION_SERVICE = "baton.v1.Generation"
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the timeout of one attempt
    ("grpc.max_reconnect_backoff_ms", 250),
)
# The coordinator has not started yet, or was restarted during the watch.
_TRANSIENT_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


async def wait_until_serving(endpoint: str, service: str = GENERATION_SERVICE) -> None:
    """Return when `service` at `endpoint` reports SERVING. Waits without a time limit.

    Raises grpc.aio.AioRpcError for any error but UNAVAILABLE and CANCELLED, which are retried.
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
