"""Two prefill and two decode nodes of one host on one pool, as real processes."""

import asyncio
from pathlib import Path

import pytest

from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, call_cluster_service
from tests.paced_reference import paced_reference_tokens
from tests.pool.harness import TIMEOUT_SECONDS, wait_until
from tests.pool.pooled_cluster import (
    PUBLISHED,
    TOKEN_SOURCES,
    count_attachments,
    generate_while_decode_dies,
    get_token_sources,
    inserted_blocks_metric,
    pooled_cluster,
    read_metric,
    wait_for_metric,
    wait_for_published_blocks,
)

PACED = {"engine": "paced", "placement": "round_robin", "paced_reread": True}
PREFIX = tuple(range(1000, 1800))  # 800 tokens, 50 blocks


async def read_prompt_tokens(cluster: Cluster, source: str) -> float:
    """Return the prompt tokens of all requests so far, from the metric."""
    return await read_metric(cluster, rf'baton_prompt_tokens_total{{source="{source}"}}')


async def get_serving_nodes(cluster: Cluster, answer: GenerateAnswer) -> set[str]:
    """Return the nodes that served the request."""
    request = pb.ExplainRequest(request_id=answer.request_id)
    explanation: pb.ExplainResponse = await call_cluster_service(
        cluster.grpc_address, "Explain", request
    )
    return {
        name
        for attempt in explanation.attempts
        for name in (attempt.prefill_node, attempt.decode_node)
    } - {""}


async def count_node_cached_blocks(cluster: Cluster) -> int:
    """Count the cached blocks of nodes that no sequence uses."""
    return sum(
        ledger.cached for ledger in (await cluster.wait_idle()).ledgers if ledger.node != "pool-0"
    )


@pytest.mark.asyncio
async def test_a_prefix_is_computed_once_on_a_host_and_in_memory_once(tmp_path: Path) -> None:
    async with pooled_cluster(tmp_path, prefill=2, decode=2, **PACED) as cluster:
        before, there = (
            await read_metric(cluster, PUBLISHED),
            await read_metric(cluster, inserted_blocks_metric("pool-0")),
        )
        prompts = [[*PREFIX, *range(number * 50, number * 50 + 20)] for number in range(1, 9)]
        first = await cluster.generate(prompts[0], max_tokens=8, ignore_eos=True)
        assert list(first.tokens) == paced_reference_tokens(prompts[0], 8)
        assert (await get_token_sources(cluster, first))["computed_prefill"] == 820
        await wait_for_published_blocks(cluster, before + 50)
        known = {source: await read_prompt_tokens(cluster, source) for source in TOKEN_SOURCES}
        answers = await asyncio.gather(
            *(cluster.generate(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts[1:])
        )
        for prompt, answer in zip(prompts[1:], answers, strict=True):
            assert list(answer.tokens) == paced_reference_tokens(prompt, 8)
            sources = await get_token_sources(cluster, answer)
            assert sources["pool"] >= 800
            assert sources["computed_prefill"] + sources["computed_decode"] <= 20
            assert answer.usage.cached_tokens >= 800
        served = [await get_serving_nodes(cluster, answer) for answer in (first, *answers)]
        assert set().union(*served) == {
            f"{role}-{number}" for role in ("prefill", "decode") for number in range(2)
        }
        prompt_tokens = {
            source: await read_prompt_tokens(cluster, source) - known[source]
            for source in TOKEN_SOURCES
        }
        assert prompt_tokens["computed_prefill"] + prompt_tokens["computed_decode"] <= 7 * 20, (
            "the prefix is computed nowhere again"
        )
        assert prompt_tokens["pool"] >= 7 * 800
        await wait_for_metric(
            cluster, r"baton_pool_repointed_blocks_total\S*", 50
        )  # private copies are given up
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (
                await count_node_cached_blocks(cluster) >= 50
            ):  # else the prefix is in some node's own memory as well
                await asyncio.sleep(0.05)
        await wait_for_metric(cluster, inserted_blocks_metric("pool-0"), there + 50 + len(prompts))
        came_in = await read_metric(cluster, inserted_blocks_metric("pool-0")) - there
        assert came_in == 50 + len(prompts), (
            "the prefix once, and the block behind it of each prompt"
        )


@pytest.mark.asyncio
async def test_killed_decode_node_loses_only_unpublished_blocks(tmp_path: Path) -> None:
    async with pooled_cluster(tmp_path, prefill=1, decode=2, **PACED) as cluster:
        prompt = list(PREFIX[:200])
        tokens, resumed = await generate_while_decode_dies(
            cluster, prompt, 70, max_tokens=120, ignore_eos=True
        )
        assert tokens == paced_reference_tokens(prompt, 120)
        assert resumed.number > 1
        assert resumed.pool >= 200
        assert resumed.computed_prefill + resumed.computed_decode <= 16 + 16, (
            "a block, and one not published yet"
        )


@pytest.mark.asyncio
async def test_cluster_computes_without_its_pool_and_attaches_to_the_next(tmp_path: Path) -> None:
    async with pooled_cluster(tmp_path, prefill=1, decode=1, **PACED) as cluster:
        prompt = list(PREFIX)

        async def ask(last: int) -> dict[str, int]:
            prompt_tokens = [*prompt, last]
            answer = await cluster.generate(prompt_tokens, max_tokens=4, ignore_eos=True)
            assert list(answer.tokens) == paced_reference_tokens(prompt_tokens, 4)
            return await get_token_sources(cluster, answer)

        before = await read_metric(cluster, PUBLISHED)
        await ask(1)
        await wait_for_published_blocks(cluster, before + 50)
        assert (await ask(2))["pool"] == 800
        cluster.kill("pool-0")
        await wait_until("without", lambda: "pool connection lost" in cluster.log_tail("prefill-0"))
        assert (await ask(3))["computed_prefill"] > 0
        assert (await ask(4))["local_cache"] > 0
        attached = count_attachments(cluster)
        cluster.start("pool-0")
        await wait_until("again", lambda: count_attachments(cluster) >= attached + 2)
        await ask(5)
        await cluster.wait_idle()


@pytest.mark.asyncio
async def test_next_turn_computes_only_its_new_tokens(tmp_path: Path) -> None:
    """Whichever nodes serve it."""
    async with pooled_cluster(tmp_path, prefill=2, decode=2, **PACED) as cluster:
        tokens, served = list(PREFIX[:100]), set[str]()
        for turn in range(5):
            answer = await cluster.generate(tokens, max_tokens=40, ignore_eos=True)
            assert list(answer.tokens) == paced_reference_tokens(tokens, 40)
            sources = await get_token_sources(cluster, answer)
            if turn:
                assert sources["computed_prefill"] + sources["computed_decode"] <= 20 + 16
            served |= await get_serving_nodes(cluster, answer)
            tokens += [*answer.tokens, *range(2000 + turn, 2020 + turn)]
            await cluster.wait_idle()
        assert len(served) == 4


@pytest.mark.asyncio
async def test_stopped_pool_costs_only_recomputation(tmp_path: Path) -> None:
    async with pooled_cluster(
        tmp_path, prefill=1, decode=1, pool_patience=0.05, **PACED
    ) as cluster:
        cluster.freeze("pool-0")
        for number in range(3):
            prompt = [number, *PREFIX[:100]]
            answer = await cluster.generate(prompt, max_tokens=20, ignore_eos=True)
            assert list(answer.tokens) == paced_reference_tokens(prompt, 20)
            assert (await get_token_sources(cluster, answer))["pool"] == 0
        cluster.resume("pool-0")
