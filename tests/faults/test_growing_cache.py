"""Nodes that serve while the memory of their caches is still being allocated."""

from pathlib import Path
from typing import Any

from node_engine.paced.paced_engine import PACED_LAYOUT
from tests.cluster import Cluster
from tests.ledger_checks import find_unbalanced_ledgers

CACHE_BYTES = 512 << 20
# Before each of the pieces that follow the first part, a node waits so long.
ENVIRON = {"BATON_FAILPOINTS": "cache.allocate.before=delay(2)"}
SETTINGS: dict[str, Any] = {
    "engine": "paced",
    "prefill": 1,
    "decode": 1,
    "kv_memory": str(CACHE_BYTES),
}


def measure_segments(cluster: Cluster) -> tuple[int, int]:
    """(bytes that the segments reserve, bytes that have memory)."""
    stats = [path.stat() for path in cluster.segment_dir.glob("baton-arena-*")]
    arenas = [stat for stat in stats if stat.st_size > 1 << 20]
    assert len(arenas) == 2
    return sum(stat.st_size for stat in arenas), sum(stat.st_blocks * 512 for stat in arenas)


async def test_a_node_serves_while_its_cache_grows_and_its_ledger_balances(tmp_path: Path) -> None:
    async with Cluster(tmp_path, environ=ENVIRON, **SETTINGS) as cluster:
        reserved, first = measure_segments(cluster)
        assert first < reserved, "the cluster is ready before all memory is allocated"
        for salt in range(4):
            answer = await cluster.generate(range(2 + salt, 2000), max_tokens=3, temperature=0)
            assert answer.finish_reason == "length"
            assert find_unbalanced_ledgers((await cluster.get_ledgers()).ledgers) == []
        ledgers = (await cluster.wait_idle()).ledgers
        assert find_unbalanced_ledgers(ledgers) == []
        assert {ledger.total for ledger in ledgers} == {CACHE_BYTES // PACED_LAYOUT.block_bytes}
        assert measure_segments(cluster)[1] < reserved, "it has served while its cache was growing"
    cluster.assert_clean()
