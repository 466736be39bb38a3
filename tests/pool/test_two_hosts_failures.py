"""Failures between the pools of two hosts cost computation, and nothing else."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.core.admission.tenants import hash_key
from kv_pool.core.peers.fetch_estimator import MIN_BACKOFF_SECONDS
from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, collect_answer, stream_generate
from tests.paced_reference import paced_reference_tokens
from tests.pool.harness import wait_until
from tests.pool.pooled_cluster import (
    count_attachments,
    get_token_sources,
    inserted_blocks_metric,
    read_metric,
    wait_for_metric,
    wait_until_known,
)
from tests.pool.two_hosts import place_only_on_hosts, two_host_cluster

TENANTS = "".join(
    f'[[tenants]]\nname = "{name}"\nkeys = ["sha256:{hash_key(name.encode()).hex()}"]\n'
    for name in ("gold", "bulk")
)
BLOCKS = 16
STARTED = r"baton_pool_promotions_started_total\S*"
_ASKED = {"max_tokens": 4, "ignore_eos": True}


def make_prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + BLOCKS * 16 + 4))


class TwoHostScenario:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def generate_on_host(
        self, tokens: Sequence[int], host: int, tenant: str = "gold"
    ) -> dict[str, int]:
        """Serve the request on nodes of that host, check its tokens, and return where its prompt
        tokens came from."""
        await place_only_on_hosts(self.cluster, host)
        async with stream_generate(
            self.cluster.grpc_address, tokens, api_key=tenant, **_ASKED
        ) as call:
            answer: GenerateAnswer = await collect_answer(call)
        assert list(answer.tokens) == paced_reference_tokens(tokens, 4)
        return await get_token_sources(self.cluster, answer)

    async def compute_on_first_host(self, tokens: Sequence[int]) -> None:
        """Compute the prompt on the first host, and wait until the coordinator knows that its
        pool has it."""
        before = await read_metric(self.cluster, inserted_blocks_metric("pool-0"))
        assert (await self.generate_on_host(tokens, 0))["computed_prefill"] == len(tokens)
        await wait_until_known(self.cluster, "pool-0", before + BLOCKS)

    async def wait_for_failures(self, reason: str, count: int = 1) -> None:
        pattern = rf'baton_pool_promotions_failed_total\{{node="pool-1",reason="{reason}"\}}'
        await wait_for_metric(self.cluster, pattern, count)

    async def count_started(self) -> float:
        return await read_metric(self.cluster, STARTED)


@pytest.mark.asyncio
async def test_every_promotion_failure_is_a_miss(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    # Where blocks are fetched to, computing takes so long that fetching is worth it on the busiest
    # machine.
    slow = {"prefill-1": {"paced_prefill_us_per_token": 10000.0}}
    paced = {"engine": "paced", "paced_reread": True, "paced_prefill_us_per_token": 200.0}
    async with two_host_cluster(tmp_path, tenants=str(tenants), per_node=slow, **paced) as cluster:
        scene = TwoHostScenario(cluster)
        await check_tenant_isolation(scene)
        await check_killed_pool(scene)
        await check_wrong_checksum(scene)
        await check_stopped_pool(scene)


async def check_tenant_isolation(scene: TwoHostScenario) -> None:
    await scene.compute_on_first_host(make_prompt(1))
    assert (await scene.generate_on_host(make_prompt(1), 1, "bulk"))["computed_prefill"] == len(
        make_prompt(1)
    )
    found = await scene.generate_on_host(make_prompt(1), 1)
    assert found["remote_pool"] == BLOCKS * 16, found
    await wait_for_metric(scene.cluster, STARTED, 1)
    assert await scene.count_started() == 1, "for the second one only"


async def check_wrong_checksum(scene: TwoHostScenario) -> None:
    await scene.compute_on_first_host(make_prompt(2))
    await scene.cluster.arm_failpoints("pool-0", "transfer.write.before=corrupt*1")
    assert (await scene.generate_on_host(make_prompt(2), 1))["computed_prefill"] == len(
        make_prompt(2)
    )
    await scene.wait_for_failures("checksum_mismatch")
    await asyncio.sleep(MIN_BACKOFF_SECONDS)


async def check_stopped_pool(scene: TwoHostScenario) -> None:
    """The fetching pool waits no longer than computing would take, and the ticket ends with its
    lease."""
    await scene.compute_on_first_host(make_prompt(3))
    scene.cluster.freeze("pool-0")
    assert (await scene.generate_on_host(make_prompt(3), 1))["computed_prefill"] == len(
        make_prompt(3)
    )
    await scene.wait_for_failures("lease_expired")
    scene.cluster.resume("pool-0")


async def check_killed_pool(scene: TwoHostScenario) -> None:
    cluster = scene.cluster
    await scene.compute_on_first_host(make_prompt(4))
    before, attached = await scene.count_started(), count_attachments(cluster)
    await cluster.arm_failpoints("pool-0", "transfer.seal.before=drop*1")  # it never ends by itself
    asking = asyncio.create_task(scene.generate_on_host(make_prompt(4), 1))
    await wait_for_metric(cluster, STARTED, before + 1)
    cluster.kill("pool-0")
    assert (await asking)["computed_prefill"] == len(make_prompt(4))
    await scene.wait_for_failures("peer_gone")
    cluster.start("pool-0")
    await wait_until("attached again", lambda: count_attachments(cluster) >= attached + 2)
    await cluster.wait_status(lambda status: len(status.nodes) == 6)
    await scene.compute_on_first_host(make_prompt(5))
    assert (await scene.generate_on_host(make_prompt(5), 1))["remote_pool"] == BLOCKS * 16
