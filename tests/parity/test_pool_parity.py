"""With a pool, tokens are still those of transformers in fp32: whatever of the prompt it has, over each transport."""

import asyncio
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.models import ClearPrompt, build_model, clear_prompts, load_reference
from tests.pool.cluster import BLOCK, metric, pooled_cluster, reaches, sources, when_decode_dies

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 600)  # the last in several chunks
OUTPUT = 24
FILLERS = [[number] * 1900 for number in range(1, 6)]  # together more than memory holds
_EVICTIONS = r'baton_pool_evictions_total\{[^}]*tier="memory"[^}]*\}'


def hits(length: int) -> list[int]:
    """How many tokens of the prompt have been asked for before: none, a block, half, all but one, all."""
    return sorted({known for known in (0, BLOCK, length // 2, length - 1, length) if known <= length})


async def quiet(cluster: Cluster) -> None:
    """Until nothing is computed or published any more."""
    counts = [-1.0, await metric(cluster, r"baton_pool_published_blocks_total\S*")]
    while counts[-1] != counts[-2]:
        await cluster.wait_quiet()
        await asyncio.sleep(0.25)  # two heartbeats
        counts.append(await metric(cluster, r"baton_pool_published_blocks_total\S*"))


async def a_killed_decode_node_changes_no_token(cluster: Cluster, asked: ClearPrompt) -> None:
    """And costs a block, and what was not published yet."""
    tokens, resumed = await when_decode_dies(cluster, asked.prompt, 40, max_tokens=64, temperature=0.0)
    assert tokens == list(asked.answer)
    assert resumed.number > 1
    assert resumed.pool >= 200
    assert resumed.computed_prefill + resumed.computed_decode <= BLOCK + BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def asked(model: Path) -> dict[int, ClearPrompt]:
    loaded = load_reference(model)
    return {length: clear_prompts(loaded, [length], OUTPUT)[0] for length in LENGTHS}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
async def test_tokens_are_those_of_transformers(
    tmp_path: Path, model: Path, asked: dict[int, ClearPrompt], transport: str
) -> None:
    """Each prompt is asked for at growing lengths, so that each time the pool has a part of it. Nodes take turns, and
    the pool is full from the beginning, so that each block that comes evicts another."""
    settings = {"dtype": "float32", "max_batched_tokens": 128, "transport": transport, "placement": "round_robin"}
    async with pooled_cluster(
        tmp_path, prefill=2, decode=2, model=str(model), pool_memory="2MiB", **settings
    ) as cluster:
        await asyncio.gather(*(cluster.generate(filler, max_tokens=1, temperature=0.0) for filler in FILLERS))
        await quiet(cluster)
        pooled = 0
        for length, prompt in asked.items():
            for known in hits(length):
                if known:
                    await cluster.generate(list(prompt.prompt[:known]), max_tokens=1, temperature=0.0)
                    await quiet(cluster)
                answer = await cluster.generate(list(prompt.prompt), max_tokens=OUTPUT, temperature=0.0)
                assert list(answer.tokens) == list(prompt.answer), (length, known)
                pooled += (await sources(cluster, answer))["pool"]
        assert pooled > 600
        await reaches(cluster, _EVICTIONS, 21)
        if transport == "shm":
            (unknown,) = clear_prompts(model, [200], 64, seed=1)
            await a_killed_decode_node_changes_no_token(cluster, unknown)
