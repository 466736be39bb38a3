"""What a pooled prefix saves, on two running nodes.

It measures the time to first token of a cold prompt and of one whose prefix is mostly in the pool,
in turns, and how soon decode's KV is found in the pool under load.
"""

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
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import SMALL_SHAPE
from benchmarks.figures.report import ResultRow, make_row
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import parse_url
from benchmarks.load.request_plan import BlockPrompt, PlannedRequest
from kv_pool.common.protocol import LATE_PUBLICATION_SECONDS

PIECE_TOKENS = 512  # prompts are made of pieces of so many tokens
PIECES_PER_PROMPT, POOLED_PIECES = 8, 7  # of a prompt, and of those in the pool
PROMPT_TOKENS = PIECE_TOKENS * PIECES_PER_PROMPT
GAIN_LIMIT = 5.0
# The load under which decode publishes; its prompts have CHAT_PROMPT_TOKENS.
STREAM_COUNT, OUTPUT_TOKENS = 4, 64
CHAT_PROMPT_TOKENS = 128
_MAX_PIECES = 1 << 20  # numbers of pieces
_TIMEOUT = 300.0  # seconds
_PUBLISHED_METRIC = "baton_pool_published_blocks_total"
_SETTINGS: dict[str, Any] = {
    "prefill": 1,
    "decode": 1,
    "mode": "disaggregated",
    "dtype": "bfloat16",
    "max_model_len": PROMPT_TOKENS + PIECE_TOKENS,
    "kv_memory": "256MiB",
    "pool_memory": "512MiB",
    "max_batched_tokens": 256,
    "stall": 120.0,  # a shared CPU may be slow
    "heartbeat": 0.1,
}


@dataclass(frozen=True, slots=True)
class _ReuseBench:
    client: CompletionsClient
    stub: cluster_pb2_grpc.ClusterStub
    fresh_pieces: Iterator[int]  # number of the next unused piece

    async def measure_ttft(self, pieces: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and the prompt tokens that were not computed."""
        request = PlannedRequest(
            0.0,
            PROMPT_TOKENS,
            2,
            seed=0,
            block_prompt=BlockPrompt("reuse", tuple(pieces), PIECE_TOKENS, _MAX_PIECES),
        )
        measurement = await self.client.measure_request(request, time.perf_counter())
        if measurement.error or not measurement.token_arrivals:
            raise ValueError(
                f"a prompt of {PROMPT_TOKENS} tokens was not answered: "
                f"{measurement.error or 'no token'}"
            )
        return measurement.ttft, measurement.cached_tokens

    async def stream_chat(self, seed: int) -> None:
        measurement = await self.client.measure_request(
            PlannedRequest(0.0, CHAT_PROMPT_TOKENS, OUTPUT_TOKENS, seed, salt="chat"),
            time.perf_counter(),
        )
        if measurement.error:
            raise ValueError(f"a stream of {OUTPUT_TOKENS} tokens ended with {measurement.error}")

    async def get_counters(self) -> dict[str, float]:
        """Return the sums of both nodes' pool counters, as of their last heartbeats."""
        status = await self.stub.Status(cluster_pb2.StatusRequest(), timeout=_TIMEOUT)
        totals: dict[str, float] = {}
        for node in status.nodes:
            for name, value in node.stats.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    async def wait_until_published(self, blocks: float) -> None:
        """Return once both nodes have published so many blocks since their start."""
        async with asyncio.timeout(_TIMEOUT):
            async for _ in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.1)):
                if (await self.get_counters()).get(_PUBLISHED_METRIC, 0.0) >= blocks:
                    return


async def measure_reuse(console: Console, rounds: int, command: str) -> list[ResultRow]:
    """Return the rows. Raises ValueError or TimeoutError when it cannot be measured."""
    async with start_local_cluster(console, SMALL_SHAPE, "small", **_SETTINGS) as cluster:
        target = parse_url(f"http://{cluster.endpoints.http}")
        client = await CompletionsClient(
            target, "", "", SMALL_SHAPE.vocabulary // 2, _TIMEOUT
        ).probe_features()
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            bench = _ReuseBench(client, cluster_pb2_grpc.ClusterStub(channel), count())
            return [
                *await _measure_gain(bench, rounds, command),
                *await _measure_publish_lag(bench, command),
            ]


async def _measure_gain(bench: _ReuseBench, rounds: int, command: str) -> list[ResultRow]:
    cold, warm = [], []
    for _ in range(rounds):
        before = (await bench.get_counters()).get(_PUBLISHED_METRIC, 0.0)
        pieces = [next(bench.fresh_pieces) for _ in range(PIECES_PER_PROMPT)]
        seconds, cached = await bench.measure_ttft(pieces)
        if cached:
            raise ValueError(f"{cached} tokens of a prompt that nobody had asked for were cached")
        cold.append(seconds)
        await bench.wait_until_published(before + POOLED_PIECES * PIECE_TOKENS // 16)
        seconds, cached = await bench.measure_ttft(
            [*pieces[:POOLED_PIECES], next(bench.fresh_pieces)]
        )
        if cached < POOLED_PIECES * PIECE_TOKENS:
            raise ValueError(
                f"only {cached} tokens of a prompt with {POOLED_PIECES * PIECE_TOKENS} in the pool "
                "were found"
            )
        warm.append(seconds)
    gains = [slow / quick for slow, quick in zip(cold, warm, strict=True)]
    return [
        make_row("pool/ttft_cold_p50", statistics.median(cold), "s", command),
        make_row("pool/ttft_warm_p50", statistics.median(warm), "s", command),
        make_row("pool/ttft_gain_p50", statistics.median(gains), "x", command, GAIN_LIMIT),
    ]


async def _measure_publish_lag(bench: _ReuseBench, command: str) -> list[ResultRow]:
    before = await bench.get_counters()
    began = time.perf_counter()
    await asyncio.gather(*(bench.stream_chat(seed) for seed in range(STREAM_COUNT)))
    seconds = time.perf_counter() - began
    await bench.wait_until_published(
        before[_PUBLISHED_METRIC] + STREAM_COUNT * ((CHAT_PROMPT_TOKENS + OUTPUT_TOKENS) // 16 - 1)
    )
    after = await bench.get_counters()
    increase = {name: value - before.get(name, 0.0) for name, value in after.items()}
    lag = (
        increase["baton_pool_publish_lag_seconds_total"] / increase["baton_pool_publications_total"]
    )
    late_total, total = (
        increase[f"baton_pool_publications_{which}total"] for which in ("late_", "")
    )
    return [
        make_row("pool/publish_lag_mean", lag, "s", command, LATE_PUBLICATION_SECONDS),
        make_row(
            f"pool/published_later_than_{LATE_PUBLICATION_SECONDS:g}_s",
            late_total,
            f"of {total:.0f} publications",
            command,
        ),
        make_row(
            "pool/published_under_load", increase[_PUBLISHED_METRIC] / seconds, "blocks/s", command
        ),
    ]
