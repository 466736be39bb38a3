"""With a disk behind a pool that evicts, tokens are still those of transformers in fp32: whatever of the prompt comes
from where."""

from pathlib import Path

import pytest

from tests.models import build_model, clear_prompts
from tests.parity.test_pool_parity import BLOCK, LENGTHS, OUTPUT, hits, quiet
from tests.pool.cluster import metric, pooled_cluster

_DISK_HITS = r'baton_pool_found_blocks_total\{[^}]*tier="disk"[^}]*\}'


@pytest.mark.timeout(240)
async def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Each prompt is asked for at growing lengths, twice, so that it was hit; then others push it out of memory, and
    the rest of it is asked for. Nodes take turns."""
    folder = build_model("llama", tmp_path)
    settings = {"dtype": "float32", "max_batched_tokens": 128, "placement": "round_robin", "transport": "shm"}
    asked = {length: clear_prompts(folder, [length], OUTPUT)[0] for length in LENGTHS}
    async with pooled_cluster(
        tmp_path, prefill=2, decode=2, model=str(folder), pool_memory="2MiB", pool_disk="8MiB", **settings
    ) as cluster:
        fillers = 0
        for length, prompt in asked.items():
            for known in hits(length):
                for _ in range(2 if known else 0):
                    await cluster.generate(list(prompt.prompt[:known]), max_tokens=1, temperature=0.0)
                    await quiet(cluster)
                if known >= BLOCK:
                    fillers += 1
                    await cluster.generate([fillers] * 1900, max_tokens=1, temperature=0.0)
                    await quiet(cluster)
                answer = await cluster.generate(list(prompt.prompt), max_tokens=OUTPUT, temperature=0.0)
                assert list(answer.tokens) == list(prompt.answer), (length, known)
        assert await metric(cluster, _DISK_HITS) > 0
        assert await metric(cluster, r'baton_pool_evictions_total\{[^}]*tier="memory"[^}]*\}') > 0
        ledgers = await cluster.ledgers()
        assert "pool-0 disk" in {ledger.node for ledger in ledgers.ledgers}
