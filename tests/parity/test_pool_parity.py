"""With a pool, tokens are still those of transformers in fp32: whatever of the prompt it has, over
each transport."""

import asyncio
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.models import StablePrompt, build_model, find_stable_prompts, load_reference_model
from tests.pool.pooled_cluster import (
    BLOCK_TOKENS,
    generate_while_decode_dies,
    get_token_sources,
    pooled_cluster,
    read_metric,
    wait_for_metric,
)

LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 600)  # the last in several chunks
OUTPUT_TOKENS = 24
FILLER_PROMPTS = [[number] * 1900 for number in range(1, 6)]  # together more than memory holds
_EVICTIONS = r'baton_pool_evictions_total\{[^}]*tier="memory"[^}]*\}'


def hit_lengths(length: int) -> list[int]:
    """How many tokens of the prompt have been asked for before: none, a block, half, all but one,
    all."""
    return sorted(
        {known for known in (0, BLOCK_TOKENS, length // 2, length - 1, length) if known <= length}
    )


async def wait_publications_done(cluster: Cluster) -> None:
    """Until nothing is computed or published any more."""
    counts = [-1.0, await read_metric(cluster, r"baton_pool_published_blocks_total\S*")]
    while counts[-1] != counts[-2]:
        await cluster.wait_idle()
        await asyncio.sleep(0.25)  # two heartbeats
        counts.append(await read_metric(cluster, r"baton_pool_published_blocks_total\S*"))


async def check_killed_decode_node_changes_no_token(cluster: Cluster, asked: StablePrompt) -> None:
    """And costs a block, and what was not published yet."""
    tokens, resumed = await generate_while_decode_dies(
        cluster, asked.prompt, 40, max_tokens=64, temperature=0.0
    )
    assert tokens == list(asked.reference_tokens)
    assert resumed.number > 1
    assert resumed.pool >= 200
    assert resumed.computed_prefill + resumed.computed_decode <= BLOCK_TOKENS + BLOCK_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(model: Path) -> dict[int, StablePrompt]:
    loaded = load_reference_model(model)
    return {length: find_stable_prompts(loaded, [length], OUTPUT_TOKENS)[0] for length in LENGTHS}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
async def test_tokens_equal_transformers_with_pool_hits(
    tmp_path: Path, model: Path, asked: dict[int, StablePrompt], transport: str
) -> None:
    """Each prompt is asked for at growing lengths, so that each time the pool has a part of it.
    Nodes take turns, and the pool is full from the beginning, so that each block that comes evicts
    another."""
    settings = {
        "dtype": "float32",
        "max_batched_tokens": 128,
        "transport": transport,
        "placement": "round_robin",
    }
    async with pooled_cluster(
        tmp_path, prefill=2, decode=2, model=str(model), pool_memory="2MiB", **settings
    ) as cluster:
        await asyncio.gather(
            *(cluster.generate(filler, max_tokens=1, temperature=0.0) for filler in FILLER_PROMPTS)
        )
        await wait_publications_done(cluster)
        pooled = 0
        for length, prompt in asked.items():
            for known in hit_lengths(length):
                if known:
                    await cluster.generate(
                        list(prompt.prompt[:known]), max_tokens=1, temperature=0.0
                    )
                    await wait_publications_done(cluster)
                answer = await cluster.generate(
                    list(prompt.prompt), max_tokens=OUTPUT_TOKENS, temperature=0.0
                )
                assert list(answer.tokens) == list(prompt.reference_tokens), (length, known)
                pooled += (await get_token_sources(cluster, answer))["pool"]
        assert pooled > 600
        await wait_for_metric(cluster, _EVICTIONS, 21)
        if transport == "shm":
            (unknown,) = find_stable_prompts(model, [200], 64, seed=1)
            await check_killed_decode_node_changes_no_token(cluster, unknown)
