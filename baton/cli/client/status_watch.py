"""Stream the cluster's status instead of polling it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.cli.client.grpc_channel import Metadata


@contextmanager
def watch_status(channel: Any, interval: float, metadata: Metadata) -> Iterator[Iterator[Any]]:
    """Yield an iterator of StatusResponses, at least `interval` seconds apart.

    The call is cancelled at the end of the block.
    """
    from baton.pb import cluster_pb2, cluster_pb2_grpc

    stub = cluster_pb2_grpc.ClusterStub(channel)
    call = stub.Watch(cluster_pb2.WatchRequest(interval_seconds=interval), metadata=metadata)
    try:
        yield call
    finally:
        call.cancel()
