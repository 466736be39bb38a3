"""A cluster of real processes whose nodes share a pool."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from baton.pb import cluster_pb2 as pb
from tests.answers import Answer, cluster_call
from tests.cluster import Cluster
from tests.pool.rig import until

SOURCES = ("computed_prefill", "computed_decode", "local_cache", "pool", "remote_pool")


@asynccontextmanager
async def pooled_cluster(folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Every node attached; afterwards nobody holds anything."""
    patience = {"pool_patience": 1.0}  # a miss is to be the pool's answer, and not that of a busy machine
    defaults = {"heartbeat": 0.1, "kv_memory": "16MiB", "pool_memory": "64MiB"} | patience
    cluster = Cluster(folder, **{**defaults, **settings})
    async with cluster:
        await until("attached", lambda: attachments(cluster) >= cluster.config.prefill + cluster.config.decode)
        yield cluster
        await cluster.wait_quiet()
    cluster.assert_clean()


def attachments(cluster: Cluster) -> int:
    """By the nodes' logs."""
    logs = (path.read_text() for path in cluster.logs.folder.glob("*.log"))
    return sum(text.count("attached to the pool") for text in logs)


async def metric(cluster: Cluster, pattern: str) -> float:
    """The sum of the series whose name and labels match."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{cluster.admin}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


async def sources(cluster: Cluster, answer: Answer) -> dict[str, int]:
    """Where the prompt's tokens came from, by `explain`."""
    told: pb.ExplainResponse = await cluster_call(
        cluster.grpc, "Explain", pb.ExplainRequest(request_id=answer.request_id)
    )
    return {name: getattr(told.sources, name) for name in SOURCES}
