"""Two hosts with a pool each, as real processes: a prefix is computed once and promoted once."""

import asyncio
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.models import build_model, find_stable_prompts
from tests.pool.harness import TIMEOUT_SECONDS
from tests.pool.pooled_cluster import (
    get_token_sources,
    read_metric,
    wait_for_published_blocks,
    wait_until_known,
)
from tests.pool.two_hosts import POOLS, place_only_on_hosts, two_host_cluster

OUTPUT = 8
# Delayed in each step from its start on, `prefill-1` never seems to compute 800 tokens in less than
# the MAX_LOAD_WAIT_SECONDS that a look-up waits for a fetch at most. With a measurement of what the
# model takes, the fetch would have to be faster than the kernels.
SLOW_STEPS = "decode.step.before=delay(0.5)"


async def wait_for_promotions(cluster: Cluster, **expected: int) -> None:
    """Wait until the pools have reported so many promotions, and no others."""
    expected = {"started": 0, "done": 0, "failed": 0} | expected
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (
            counters := {
                name: await read_metric(cluster, rf"baton_pool_promotions_{name}_total\S*")
                for name in expected
            }
        ) != expected:
            assert all(counters[name] <= expected[name] for name in expected), counters
            await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_a_prefix_is_computed_once_and_moved_once(tmp_path: Path) -> None:
    model = build_model("llama", tmp_path)
    prefix = [token % 500 for token in range(7, 7 * 801, 7)][:800]
    prompts = find_stable_prompts(model, (820,) * 6, OUTPUT, shared_prefix=prefix)
    settings = {"model": str(model), "dtype": "float32", "threads": "1", "placement": "round_robin"}
    slow = {"prefill-1": {"BATON_FAILPOINTS": SLOW_STEPS}}
    async with two_host_cluster(tmp_path, per_node=slow, **settings) as cluster:
        await place_only_on_hosts(cluster, 1)
        # As long as the warm-up request, which either prefill node may have computed.
        await cluster.generate([501, 502, 503, 504], max_tokens=1)
        await place_only_on_hosts(cluster, 0)
        first = await cluster.generate(prompts[0].prompt, max_tokens=OUTPUT, temperature=0.0)
        assert first.tokens == prompts[0].reference_tokens
        assert (await get_token_sources(cluster, first))["computed_prefill"] == 820
        await wait_for_published_blocks(cluster, 50)
        await wait_until_known(cluster, "pool-0", 50)
        await place_only_on_hosts(cluster, 0, 1)
        answers = await asyncio.gather(
            *(
                cluster.generate(prompt.prompt, max_tokens=OUTPUT, temperature=0.0)
                for prompt in prompts[1:]
            )
        )
        remote = 0
        for prompt, answer in zip(prompts[1:], answers, strict=True):
            assert answer.tokens == prompt.reference_tokens
            sources = await get_token_sources(cluster, answer)
            assert sources["pool"] + sources["remote_pool"] >= 800
            assert sources["computed_prefill"] + sources["computed_decode"] <= 20
            remote += sources["remote_pool"]
        assert remote >= 800, "of whoever waited for it"
        await wait_for_promotions(cluster, started=1, done=1)
        ledgers = {ledger.node: ledger.cached for ledger in (await cluster.wait_idle()).ledgers}
        assert all(50 <= ledgers.pop(pool) < 100 for pool in POOLS), "once per pool"
        assert sum(ledgers.values()) < 50, "and in no node's own memory"
        assert await read_metric(cluster, r"baton_pool_promoted_blocks_total\S*") == 50
