"""What a pooled prefix saves: the first token of a prompt that nobody has computed, and of one most of which is in the
pool, in turns on the same two nodes. And how soon after it is computed decode's KV is found there, under load."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc.aio
from rich.console import Console

from baton.pb import cluster_pb2, cluster_pb2_grpc
from benchmarks.completions import Client
from benchmarks.http_stream import parse_url
from benchmarks.local_cluster import local_cluster
from benchmarks.models import SMALL
from benchmarks.report import Row, row
from benchmarks.schedule import Planned, Shared
from kv_pool.terms import LATE

PIECE = 512  # tokens of which prompts are made
PIECES, POOLED = 8, 7  # of a prompt, and of those in the pool
PROMPT = PIECE * PIECES  # tokens
GAIN_LIMIT = 5.0
STREAMS, OUTPUT = 4, 64  # of the load under which decode publishes; prompts of CHAT tokens
CHAT = 128
_MOST = 1 << 20  # numbers of pieces
_PATIENCE = 300.0  # seconds
_PUBLISHED = "baton_pool_published_blocks_total"
_SETTINGS: dict[str, Any] = {
    "prefill": 1,
    "decode": 1,
    "mode": "disaggregated",
    "dtype": "bfloat16",
    "max_model_len": PROMPT + PIECE,
    "kv_memory": "256MiB",
    "pool_memory": "512MiB",
    "max_batched_tokens": 256,
    "stall": 120.0,  # a CPU that others share takes its time
    "heartbeat": 0.1,
}


@dataclass(frozen=True, slots=True)
class _Bench:
    client: Client
    stub: cluster_pb2_grpc.ClusterStub
    pieces: Iterator[int]  # that nobody has asked for

    async def ttft(self, pieces: list[int]) -> tuple[float, int]:
        """Seconds, and how many tokens of the prompt were not computed."""
        asked = Planned(0.0, PROMPT, 2, seed=0, shared=Shared("reuse", tuple(pieces), PIECE, _MOST))
        seen = await self.client.measure(asked, time.perf_counter())
        if seen.error or not seen.arrivals:
            raise ValueError(f"a prompt of {PROMPT} tokens was not answered: {seen.error or 'no token'}")
        return seen.ttft, seen.cached_tokens

    async def stream(self, seed: int) -> None:
        seen = await self.client.measure(Planned(0.0, CHAT, OUTPUT, seed, salt="chat"), time.perf_counter())
        if seen.error:
            raise ValueError(f"a stream of {OUTPUT} tokens ended with {seen.error}")

    async def counters(self) -> dict[str, float]:
        """Of both nodes' use of the pool, by their last heartbeats."""
        status = await self.stub.Status(cluster_pb2.StatusRequest(), timeout=_PATIENCE)
        found: dict[str, float] = {}
        for node in status.nodes:
            for name, value in node.stats.counters.items():
                found[name] = found.get(name, 0.0) + value
        return found

    async def until_published(self, blocks: float) -> None:
        """So many, by both nodes since their start."""
        async with asyncio.timeout(_PATIENCE):
            async for _ in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.1)):
                if (await self.counters()).get(_PUBLISHED, 0.0) >= blocks:
                    return


async def reuse_rows(console: Console, rounds: int, command: str) -> list[Row]:
    """Raises ValueError or TimeoutError when it cannot be measured."""
    async with local_cluster(console, SMALL, "small", **_SETTINGS) as cluster:
        target = parse_url(f"http://{cluster.endpoints.http}")
        client = await Client(target, "", "", SMALL.vocabulary // 2, _PATIENCE).probe()
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            bench = _Bench(client, cluster_pb2_grpc.ClusterStub(channel), count())
            return [*await _gain(bench, rounds, command), *await _lag(bench, command)]


async def _gain(bench: _Bench, rounds: int, command: str) -> list[Row]:
    cold, warm = [], []
    for _ in range(rounds):
        before = (await bench.counters()).get(_PUBLISHED, 0.0)
        pieces = [next(bench.pieces) for _ in range(PIECES)]
        seconds, cached = await bench.ttft(pieces)
        if cached:
            raise ValueError(f"{cached} tokens of a prompt that nobody had asked for were cached")
        cold.append(seconds)
        await bench.until_published(before + POOLED * PIECE // 16)
        seconds, cached = await bench.ttft([*pieces[:POOLED], next(bench.pieces)])
        if cached < POOLED * PIECE:
            raise ValueError(f"only {cached} tokens of a prompt with {POOLED * PIECE} in the pool were found")
        warm.append(seconds)
    gains = [slow / quick for slow, quick in zip(cold, warm, strict=True)]
    return [
        row("pool/ttft_cold_p50", statistics.median(cold), "s", command),
        row("pool/ttft_warm_p50", statistics.median(warm), "s", command),
        row("pool/ttft_gain_p50", statistics.median(gains), "x", command, GAIN_LIMIT),
    ]


async def _lag(bench: _Bench, command: str) -> list[Row]:
    before = await bench.counters()
    began = time.perf_counter()
    await asyncio.gather(*(bench.stream(seed) for seed in range(STREAMS)))
    seconds = time.perf_counter() - began
    await bench.until_published(before[_PUBLISHED] + STREAMS * ((CHAT + OUTPUT) // 16 - 1))
    after = await bench.counters()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    lag = grown["baton_pool_publish_lag_seconds_total"] / grown["baton_pool_publications_total"]
    late, every = (grown[f"baton_pool_publications_{which}total"] for which in ("late_", ""))
    return [
        row("pool/publish_lag_mean", lag, "s", command, LATE),
        row(f"pool/published_later_than_{LATE:g}_s", late, f"of {every:.0f} publications", command),
        row("pool/published_under_load", grown[_PUBLISHED] / seconds, "blocks/s", command),
    ]
