"""Two hosts with a pool each, and what can go wrong between the pools: it costs computing, and nothing else."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.core.tenants import hash_key
from kv_pool.core.peer_book import REST
from node_engine.paced import paced_reference
from tests.answers import Answer, collect, streaming
from tests.cluster import Cluster
from tests.pool.cluster import attachments, inserted, known, metric, reaches, sources
from tests.pool.rig import until
from tests.pool.two_hosts import in_service, two_hosts

TENANTS = "".join(
    f'[[tenants]]\nname = "{name}"\nkeys = ["sha256:{hash_key(name.encode()).hex()}"]\n' for name in ("gold", "bulk")
)
BLOCKS = 30
STARTED = r"baton_pool_promotions_started_total\S*"
_ASKED = {"max_tokens": 4, "ignore_eos": True}


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + BLOCKS * 16 + 4))


class Scene:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def ask(self, tokens: Sequence[int], host: int, tenant: str = "gold") -> dict[str, int]:
        """Answered rightly, by nodes of that host. Where its tokens came from."""
        await in_service(self.cluster, host)
        async with streaming(self.cluster.grpc, tokens, api_key=tenant, **_ASKED) as call:
            answer: Answer = await collect(call)
        assert list(answer.tokens) == paced_reference(tokens, 4)
        return await sources(self.cluster, answer)

    async def known(self, tokens: Sequence[int]) -> None:
        """Computed on the first host, and in its pool, as the coordinator knows."""
        before = await metric(self.cluster, inserted("pool-0"))
        assert (await self.ask(tokens, 0))["computed_prefill"] == len(tokens)
        await known(self.cluster, "pool-0", before + BLOCKS)

    async def failed(self, reason: str, count: int = 1) -> None:
        pattern = rf'baton_pool_promotions_failed_total\{{node="pool-1",reason="{reason}"\}}'
        await reaches(self.cluster, pattern, count)

    async def started(self) -> float:
        return await metric(self.cluster, STARTED)


@pytest.mark.asyncio
async def test_every_failure_is_a_miss(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    # Where blocks are fetched to, computing takes so long that fetching is worth it on the busiest machine.
    slow = {"prefill-1": {"paced_prefill_us_per_token": 4000.0}}
    paced = {"engine": "paced", "paced_reread": True, "paced_prefill_us_per_token": 200.0}
    async with two_hosts(tmp_path, tenants=str(tenants), per_node=slow, **paced) as cluster:
        scene = Scene(cluster)
        await another_tenants(scene)
        await a_killed_pool(scene)
        await a_wrong_checksum(scene)
        await a_stopped_pool(scene)


async def another_tenants(scene: Scene) -> None:
    await scene.known(prompt(1))
    assert (await scene.ask(prompt(1), 1, "bulk"))["computed_prefill"] == len(prompt(1))
    assert (await scene.ask(prompt(1), 1))["remote_pool"] == BLOCKS * 16
    await reaches(scene.cluster, STARTED, 1)
    assert await scene.started() == 1, "for the second one only"


async def a_wrong_checksum(scene: Scene) -> None:
    await scene.known(prompt(2))
    await scene.cluster.arm("pool-0", "transfer.write.before=corrupt*1")
    assert (await scene.ask(prompt(2), 1))["computed_prefill"] == len(prompt(2))
    await scene.failed("checksum_mismatch")
    await asyncio.sleep(REST)


async def a_stopped_pool(scene: Scene) -> None:
    """Whoever asks waits no longer than computing would take, and the ticket ends by its lease."""
    await scene.known(prompt(3))
    scene.cluster.stop("pool-0")
    assert (await scene.ask(prompt(3), 1))["computed_prefill"] == len(prompt(3))
    await scene.failed("lease_expired")
    scene.cluster.cont("pool-0")


async def a_killed_pool(scene: Scene) -> None:
    cluster = scene.cluster
    await scene.known(prompt(4))
    before, attached = await scene.started(), attachments(cluster)
    await cluster.arm("pool-0", "transfer.seal.before=drop*1")  # it never ends by itself
    asking = asyncio.create_task(scene.ask(prompt(4), 1))
    await reaches(cluster, STARTED, before + 1)
    cluster.kill("pool-0")
    assert (await asking)["computed_prefill"] == len(prompt(4))
    await scene.failed("peer_gone")
    cluster.start("pool-0")
    await until("attached again", lambda: attachments(cluster) >= attached + 2)
    await cluster.wait_status(lambda status: len(status.nodes) == 6)
    await scene.known(prompt(5))
    assert (await scene.ask(prompt(5), 1))["remote_pool"] == BLOCKS * 16
