"""With a pool, tokens are still those of transformers in fp32: whatever of the prompt it has, over
each transport."""

import asyncio
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.models import StablePrompt, build_model, find_stable_prompts, load_reference_model
from tests.parity.pool_cases import (
    FILLER_PROMPTS,
    LENGTHS,
    OUTPUT_TOKENS,
    hit_lengths,
    wait_publications_done,
)
from tests.pool.pooled_cluster import (
    BLOCK_TOKENS,
    generate_while_decode_dies,
    get_token_sources,
    pooled_cluster,
    wait_for_metric,
)

_EVICTIONS = r'baton_pool_evictions_total\{[^}]*tier="memory"[^}]*\}'


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


@pytest.mark.parametrize(
    "transport", ["shm", "grpc", pytest.param("zmq", marks=pytest.mark.thorough)]
)
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
