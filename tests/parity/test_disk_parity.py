"""With a disk behind a pool that evicts, tokens are still those of transformers in fp32: whatever
of the prompt comes from where."""

import asyncio
from pathlib import Path

import pytest

from tests.models import StablePrompt, build_model, find_stable_prompts
from tests.parity.pool_cases import (
    FILLER_PROMPTS,
    LENGTHS,
    OUTPUT_TOKENS,
    hit_lengths,
    wait_publications_done,
)
from tests.pool.pooled_cluster import pooled_cluster, wait_for_metric

_DISK_HITS = r'baton_pool_found_blocks_total\{[^}]*tier="disk"[^}]*\}'


CASES = [(length, known) for length in LENGTHS for known in hit_lengths(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StablePrompt]]:
    folder = build_model("llama", tmp_path_factory.mktemp("model"))
    return folder, find_stable_prompts(folder, [length for length, _ in CASES], OUTPUT_TOKENS)


@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        pytest.param("zmq", marks=pytest.mark.thorough),
        pytest.param("grpc", marks=pytest.mark.thorough),
    ],
)
async def test_tokens_equal_transformers_with_disk_hits(
    tmp_path: Path, model: tuple[Path, list[StablePrompt]], transport: str
) -> None:
    """Of each prompt a part is asked for twice, so that it was hit. Then other prompts push all of
    it out of memory, and the whole of each is asked for. Nodes take turns."""
    folder, prompts = model
    settings = {
        "dtype": "float32",
        "max_batched_tokens": 128,
        "placement": "round_robin",
        "transport": transport,
    }
    pool = {"pool_memory": "2MiB", "pool_disk": "8MiB", "pool_eviction": "lru"}
    async with pooled_cluster(
        tmp_path, prefill=2, decode=2, model=str(folder), **pool, **settings
    ) as cluster:

        async def generate(prompt: list[int], count: int) -> list[int]:
            return list((await cluster.generate(prompt, max_tokens=count, temperature=0.0)).tokens)

        parts = [
            list(prompt.prompt[:known])
            for (_, known), prompt in zip(CASES, prompts, strict=True)
            if known
        ]
        for asked in (parts, parts, FILLER_PROMPTS):
            await asyncio.gather(*(generate(prompt, 1) for prompt in asked))
            await wait_publications_done(cluster)
        for case, prompt in zip(CASES, prompts, strict=True):
            assert await generate(list(prompt.prompt), OUTPUT_TOKENS) == list(
                prompt.reference_tokens
            ), case
        await wait_publications_done(cluster)
        await wait_for_metric(cluster, _DISK_HITS, 1)
        assert "pool-0 disk" in {ledger.node for ledger in (await cluster.get_ledgers()).ledgers}
