"""A cluster of paced nodes whose ratio is turned, and what its clients see of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio
from rich.console import Console

from baton.pb import cluster_pb2, cluster_pb2_grpc
from baton.ratio import Split
from baton.slo import Slo
from benchmarks import ratio_workloads as workloads
from benchmarks.completions import Client
from benchmarks.http_stream import parse_url
from benchmarks.load import drive
from benchmarks.local_cluster import local_cluster
from benchmarks.measurement import Measurement
from benchmarks.models import NARROW
from benchmarks.schedule import Planned, Poisson

GRACE = 10.0  # seconds after the last arrival until what still runs is cut off
_PATIENCE = 60.0
_VOCABULARY = 30000
_AS_PLANNED = Poisson(1.0)  # open arrivals, at the moments of the plan


@dataclass(slots=True)
class PacedCluster:
    client: Client
    stub: cluster_pb2_grpc.ClusterStub
    seen: list[tuple[float, Split]] = field(default_factory=list)  # when which ratio was there, while it is watched

    async def set(self, split: Split) -> None:
        """Returns when the nodes have their roles."""
        request = cluster_pb2.SetRatioRequest(prefill=split.prefill, decode=split.decode, flip_timeout_seconds=0.0)
        asked = await self.stub.SetRatio(request, timeout=_PATIENCE)
        async with asyncio.timeout(_PATIENCE):
            async for status in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.1)):
                if status.ratio.generation != asked.generation or status.ratio.settled:
                    return

    async def advise(self, slo: Slo) -> cluster_pb2.RatioAdvice:
        request = cluster_pb2.AdviseRatioRequest(slo=str(slo))
        advice: cluster_pb2.RatioAdvice = await self.stub.AdviseRatio(request, timeout=_PATIENCE)
        return advice

    async def auto(self, slo: Slo) -> None:
        await self.stub.AutoRatio(cluster_pb2.AutoRatioRequest(slo=str(slo)), timeout=_PATIENCE)

    async def manual(self) -> None:
        await self.stub.ManualRatio(cluster_pb2.ManualRatioRequest(), timeout=_PATIENCE)

    async def moves(self) -> int:
        """Of the ratio by `auto`, since the cluster's start."""
        status = await self.stub.Status(cluster_pb2.StatusRequest(), timeout=_PATIENCE)
        return int(status.counters.get("baton_ratio_moves_total", 0.0))

    async def offer(self, plan: Sequence[Planned], seconds: float, salt: str) -> list[Measurement]:
        """Send it, with prompts that no cache has."""
        return await drive(self.client, _AS_PLANNED, [replace(one, salt=salt) for one in plan], seconds + GRACE)

    async def watch(self) -> None:
        """Write down the ratio whenever it changes, until cancelled."""
        async for status in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.5)):
            split = Split(status.ratio.prefill, status.ratio.decode)
            if not self.seen or self.seen[-1][1] != split:
                self.seen.append((time.perf_counter(), split))


@asynccontextmanager
async def paced_cluster(console: Console) -> AsyncIterator[PacedCluster]:
    async with local_cluster(console, NARROW, "paced", **workloads.settings()) as cluster:
        client = Client(parse_url(f"http://{cluster.endpoints.http}"), "", "", _VOCABULARY, _PATIENCE)
        client = await client.probe()
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            made = PacedCluster(client, cluster_pb2_grpc.ClusterStub(channel))
            await _calibrate(made)
            yield made


async def _calibrate(cluster: PacedCluster) -> None:
    """Let the coordinator learn what things take, as a cluster that has served for a while has."""
    for name, load in workloads.WORKLOADS.items():
        await cluster.offer(load.plan(name, 5.0), 5.0, "calibration")


def share(seen: Sequence[Measurement], slo: Slo) -> float:
    """Of those that were sent, the share that was served within the objective."""
    return sum(good(one, slo) for one in seen) / len(seen) if seen else 0.0


def good(one: Measurement, slo: Slo) -> bool:
    return not one.error and bool(one.arrivals) and slo.met(one.ttft, one.tpot)
