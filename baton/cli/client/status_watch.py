"""The cluster's status as it changes: one stream, no polling."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.cli.client.grpc_channel import Metadata


@contextmanager
def watch_status(channel: Any, interval: float, metadata: Metadata) -> Iterator[Iterator[Any]]:
    """StatusResponses, `interval` seconds apart at least. The call ends with the block."""
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    stub = cluster_pb2_grpc.ClusterStub(channel)
    call = stub.Watch(cluster_pb2.WatchRequest(interval_seconds=interval), metadata=metadata)
    try:
        yield call
    finally:
        call.cancel()
