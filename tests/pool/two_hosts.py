"""Two hosts in one machine: a prefill node, a decode node and a pool each, with segment folders of
their own. Nodes and pool of a host prove by their folder that they are on one; nothing of the other
can be mapped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.cli.supervisor.ports import reserve_port
from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.grpc_calls import call_cluster_service
from tests.pool.harness import wait_until
from tests.pool.pooled_cluster import SETTINGS, count_attachments

POOLS = ("pool-0", "pool-1")


@asynccontextmanager
async def two_host_cluster(folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """`prefill-0`, `decode-0` and `pool-0` are of one host, the others of the other. Every node is
    attached; afterwards nobody holds anything."""
    cluster = Cluster(
        folder, also={"pool-1": "pool-0"}, prefill=2, decode=2, **{**SETTINGS, **settings}
    )
    other = cluster.segment_dir / "other-host"
    other.mkdir()
    held = reserve_port("127.0.0.1", 0, "--listen")
    address = f"127.0.0.1:{held.getsockname()[1]}"
    for name in ("prefill-1", "decode-1"):
        cluster.per_node[name] = {
            "segment_dir": other,
            "pool": address,
            **cluster.per_node.get(name, {}),
        }
    cluster.per_node["pool-1"] = {"segment_dir": other, "listen": address, "ticket_ttl": 2.0}
    try:
        async with cluster:
            await wait_until("attached", lambda: count_attachments(cluster) >= 4)
            await cluster.wait_status(lambda status: len(status.nodes) == 6)
            yield cluster
            await cluster.wait_idle()
        cluster.assert_clean()
    finally:
        held.close()


async def place_only_on_hosts(cluster: Cluster, *hosts: int) -> None:
    """Place new requests only on nodes of these hosts."""
    for name in ("prefill", "decode"):
        for host in (0, 1):
            node = f"{name}-{host}"
            request = pb.UndrainRequest(node=node) if host in hosts else pb.DrainRequest(node=node)
            method = "Undrain" if host in hosts else "Drain"
            await call_cluster_service(
                cluster.grpc_address, method, request, admin_token=cluster.config.admin_token
            )
