"""A cluster of paced nodes whose ratio changes, and what its clients measure."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio
from rich.console import Console

from baton.pb import cluster_pb2, cluster_pb2_grpc
from baton.role_split import RoleSplit
from baton.slo import Slo
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import NARROW_SHAPE
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import parse_url
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest, PoissonArrivals
from benchmarks.load.run_load import run_load
from benchmarks.scenarios import ratio_workloads as workloads

GRACE_SECONDS = 10.0  # after the last arrival, until running requests are cancelled
_RPC_TIMEOUT = 60.0
_VOCABULARY = 30000
_AS_PLANNED = PoissonArrivals(1.0)  # open loop, at the times of the plan


@dataclass(slots=True)
class PacedCluster:
    client: CompletionsClient
    stub: cluster_pb2_grpc.ClusterStub
    # (time of the change, split), while `record_ratio_changes` runs
    ratio_history: list[tuple[float, RoleSplit]] = field(default_factory=list)

    async def set_ratio(self, split: RoleSplit) -> None:
        """Set the ratio, and return when the nodes have their roles."""
        request = cluster_pb2.SetRatioRequest(
            prefill=split.prefill_nodes, decode=split.decode_nodes, flip_timeout_seconds=0.0
        )
        accepted = await self.stub.SetRatio(request, timeout=_RPC_TIMEOUT)
        async with asyncio.timeout(_RPC_TIMEOUT):
            async for status in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.1)):
                if status.ratio.generation != accepted.generation or status.ratio.settled:
                    return

    async def get_advice(self, slo: Slo) -> cluster_pb2.RatioAdvice:
        request = cluster_pb2.AdviseRatioRequest(slo=str(slo))
        advice: cluster_pb2.RatioAdvice = await self.stub.AdviseRatio(request, timeout=_RPC_TIMEOUT)
        return advice

    async def enable_auto_ratio(self, slo: Slo) -> None:
        await self.stub.AutoRatio(cluster_pb2.AutoRatioRequest(slo=str(slo)), timeout=_RPC_TIMEOUT)

    async def disable_auto_ratio(self) -> None:
        await self.stub.ManualRatio(cluster_pb2.ManualRatioRequest(), timeout=_RPC_TIMEOUT)

    async def count_ratio_changes(self) -> int:
        """Return how often `auto` has changed the ratio since the cluster's start."""
        status = await self.stub.Status(cluster_pb2.StatusRequest(), timeout=_RPC_TIMEOUT)
        return int(status.counters.get("baton_ratio_moves_total", 0.0))

    async def send_plan(
        self, plan: Sequence[PlannedRequest], seconds: float, salt: str
    ) -> list[RequestMeasurement]:
        """Send the plan, with prompts that no cache has."""
        return await run_load(
            self.client,
            _AS_PLANNED,
            [replace(request, salt=salt) for request in plan],
            seconds + GRACE_SECONDS,
        )

    async def record_ratio_changes(self) -> None:
        """Record the ratio whenever it changes, until cancelled."""
        async for status in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.5)):
            split = RoleSplit(status.ratio.prefill, status.ratio.decode)
            if not self.ratio_history or self.ratio_history[-1][1] != split:
                self.ratio_history.append((time.perf_counter(), split))


@asynccontextmanager
async def paced_cluster(console: Console) -> AsyncIterator[PacedCluster]:
    async with start_local_cluster(
        console, NARROW_SHAPE, "paced", **workloads.cluster_settings()
    ) as cluster:
        client = CompletionsClient(
            parse_url(f"http://{cluster.endpoints.http}"), "", "", _VOCABULARY, _RPC_TIMEOUT
        )
        client = await client.probe_features()
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            paced = PacedCluster(client, cluster_pb2_grpc.ClusterStub(channel))
            await _calibrate(paced)
            yield paced


async def _calibrate(cluster: PacedCluster) -> None:
    """Let the coordinator learn its cost model, as in a cluster that has served for a while."""
    for name, load in workloads.RATIO_WORKLOADS.items():
        await cluster.send_plan(load.plan_requests(name, 5.0), 5.0, "calibration")


def slo_share(measurements: Sequence[RequestMeasurement], slo: Slo) -> float:
    """Return the share of the sent requests that were served within the SLO."""
    return (
        sum(meets_slo(measurement, slo) for measurement in measurements) / len(measurements)
        if measurements
        else 0.0
    )


def meets_slo(measurement: RequestMeasurement, slo: Slo) -> bool:
    return (
        not measurement.error
        and bool(measurement.token_arrivals)
        and slo.is_met(measurement.ttft, measurement.tpot)
    )
