"""A cluster of real processes whose nodes share a pool."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from baton.kv.cache_journal import FLUSH_INTERVAL_SECONDS
from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, call_cluster_service
from tests.pool.harness import TIMEOUT_SECONDS, wait_until

PUBLISHED = r"baton_pool_published_blocks_total\S*"

BLOCK_TOKENS = 16  # tokens
TOKEN_SOURCES = ("computed_prefill", "computed_decode", "local_cache", "pool", "remote_pool")
SETTINGS = {
    "heartbeat": 0.1,
    "kv_memory": "16MiB",
    "pool_memory": "64MiB",
    "pool_patience": 10.0,  # so that a miss is the pool's answer, not a time-out
}


@asynccontextmanager
async def pooled_cluster(folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Run a cluster with all nodes attached; checks at its end that nothing is held."""
    cluster = Cluster(folder, **{**SETTINGS, **settings})
    async with cluster:
        await wait_until(
            "attached",
            lambda: count_attachments(cluster) >= cluster.config.prefill + cluster.config.decode,
        )
        yield cluster
        await cluster.wait_idle()
    cluster.assert_clean()


def count_attachments(cluster: Cluster) -> int:
    """Count attachments by the nodes' logs."""
    logs = (path.read_text() for path in cluster.logs.folder.glob("*.log"))
    return sum(text.count("attached to the pool") for text in logs)


async def read_metric(cluster: Cluster, pattern: str) -> float:
    """Return the sum of the series whose name and labels match."""
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"{cluster.admin_url}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


async def wait_for_metric(cluster: Cluster, pattern: str, least: float) -> None:
    """Wait until that sum is reached; nodes report their counts with heartbeats."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await read_metric(cluster, pattern) < least:
            await asyncio.sleep(0.05)


def inserted_blocks_metric(pool: str) -> str:
    """Return the name of the metric of the blocks that a pool has inserted."""
    return rf'baton_pool_inserted_blocks_total\{{node="{pool}"\}}'


async def wait_until_known(cluster: Cluster, pool: str, blocks: float) -> None:
    """Until that pool has taken in so many blocks, and the coordinator knows which. That a
    directory has as many is not enough: nodes have told of their own copies before."""
    await wait_for_metric(cluster, inserted_blocks_metric(pool), blocks)
    await asyncio.sleep(FLUSH_INTERVAL_SECONDS)  # after which a pool tells what it has gained
    # The first answer may be to a query sent while the pool was stopped; before the second one it
    # has sent its events.
    for _ in range(2):
        await cluster.get_ledgers()


async def generate_while_decode_dies(
    cluster: Cluster, prompt: Sequence[int], steps: int, **fields: Any
) -> tuple[list[int], pb.AttemptReport]:
    """An answer whose decode node hardly gets further after `steps` steps, and is killed once the
    pool has every full block that was written until then: its tokens, and what is told of the
    attempt that ended it. The node is back then. `prompt` has nothing in common with earlier
    ones."""
    before, nodes = (
        await read_metric(cluster, inserted_blocks_metric("pool-0")),
        len((await cluster.get_status()).nodes),
    )
    await cluster.arm_failpoints("decode", f"decode.step.before=delay(0.5)+{steps}")
    tokens: list[int] = []
    victim = ""
    async with cluster.stream_generate(prompt, **fields) as call:
        async for part in call:
            tokens += part.token_ids
            if len(tokens) >= steps and not victim:
                await wait_for_metric(
                    cluster,
                    inserted_blocks_metric("pool-0"),
                    before + (len(prompt) + len(tokens) - 1) // BLOCK_TOKENS,
                )
                status = await cluster.get_status()
                (victim,) = [
                    node.name for node in status.nodes if node.role == "decode" and node.placed
                ]
                cluster.kill(victim)
    await cluster.arm_failpoints("decode", "")
    explanation: pb.ExplainResponse = await call_cluster_service(
        cluster.grpc_address, "Explain", pb.ExplainRequest(request_id=part.request_id)
    )
    cluster.start(victim)
    await cluster.wait_status(lambda status: len(status.nodes) == nodes)
    return tokens, explanation.attempts[-1]


async def get_token_sources(cluster: Cluster, answer: GenerateAnswer) -> dict[str, int]:
    """Return where the prompt's tokens came from, by `baton explain`."""
    explanation: pb.ExplainResponse = await call_cluster_service(
        cluster.grpc_address, "Explain", pb.ExplainRequest(request_id=answer.request_id)
    )
    return {name: getattr(explanation.sources, name) for name in TOKEN_SOURCES}


async def wait_for_published_blocks(cluster: Cluster, blocks: float) -> None:
    """Wait until nodes have published so many blocks, and no publication is under way."""
    await wait_for_metric(cluster, PUBLISHED, blocks)
    await cluster.wait_idle()
