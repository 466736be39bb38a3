"""With a disk behind a pool that evicts, tokens are still those of transformers in fp32: whatever of the prompt comes
from where."""

import asyncio
from pathlib import Path

import pytest

from tests.models import ClearPrompt, build_model, clear_prompts
from tests.parity.test_pool_parity import FILLERS, LENGTHS, OUTPUT, hits, quiet
from tests.pool.cluster import pooled_cluster, reaches

_DISK_HITS = r'baton_pool_found_blocks_total\{[^}]*tier="disk"[^}]*\}'


CASES = [(length, known) for length in LENGTHS for known in hits(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ClearPrompt]]:
    folder = build_model("llama", tmp_path_factory.mktemp("model"))
    return folder, clear_prompts(folder, [length for length, _ in CASES], OUTPUT)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["shm", "zmq", "grpc"])
async def test_tokens_are_those_of_transformers(
    tmp_path: Path, model: tuple[Path, list[ClearPrompt]], transport: str
) -> None:
    """Of each prompt a part is asked for twice, so that it was hit. Then other prompts push all of it out of memory,
    and the whole of each is asked for. Nodes take turns."""
    folder, prompts = model
    settings = {"dtype": "float32", "max_batched_tokens": 128, "placement": "round_robin", "transport": transport}
    pool = {"pool_memory": "2MiB", "pool_disk": "8MiB", "pool_eviction": "lru"}
    async with pooled_cluster(tmp_path, prefill=2, decode=2, model=str(folder), **pool, **settings) as cluster:

        async def generate(prompt: list[int], count: int) -> list[int]:
            return list((await cluster.generate(prompt, max_tokens=count, temperature=0.0)).tokens)

        parts = [list(prompt.prompt[:known]) for (_, known), prompt in zip(CASES, prompts, strict=True) if known]
        for asked in (parts, parts, FILLERS):
            await asyncio.gather(*(generate(prompt, 1) for prompt in asked))
            await quiet(cluster)
        for case, prompt in zip(CASES, prompts, strict=True):
            assert await generate(list(prompt.prompt), OUTPUT) == list(prompt.answer), case
        await quiet(cluster)
        await reaches(cluster, _DISK_HITS, 1)
        assert "pool-0 disk" in {ledger.node for ledger in (await cluster.ledgers()).ledgers}
