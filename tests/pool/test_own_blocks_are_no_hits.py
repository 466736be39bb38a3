"""Blocks that a request computes itself are never counted as cache hits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PrefillOrder, TicketOrder
from baton.errors import Cancelled
from tests.paced_reference import paced_reference_tokens
from tests.pool.in_process_nodes import InProcessHost, reference_tokens
from tests.pool.pooled_cluster import (
    inserted_blocks_metric,
    pooled_cluster,
    read_metric,
    wait_for_metric,
)
from tests.unit.node_roles.role_bench import WRITER, make_work

PROMPT = tuple(range(100, 164))  # 64 tokens: four full blocks


@pytest.fixture
def host(tmp_path: Path) -> Iterator[InProcessHost]:
    host = InProcessHost(tmp_path, num_blocks=64)
    yield host
    host.close()


def test_late_lookup_of_decode_finds_no_blocks_of_its_own_attempt(host: InProcessHost) -> None:
    """Prefill has computed everything before the decode node hears of the request."""
    sender, receiver = host.prefill[0], host.decode[0]
    job = make_work(PROMPT)
    sender.send_item(PrefillOrder(job, needs_no_decode=False))
    while sender.step():
        pass
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 0, (
        "nothing is published before the decode node has answered"
    )
    receiver.send_item(DecodeOrder(job, WRITER))
    assert receiver.pop_messages("reserved")[0].held_tokens == 0
    (ticket,) = receiver.plane.granted.values()
    sender.send_item(TicketOrder(ticket))
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 4, "and then at once"
    host.land_handoff(sender, receiver, job.key)
    while receiver.step():
        pass
    assert receiver.collect_tokens(job.key) == reference_tokens(job)
    admitted = receiver.pop_messages("admitted")[0]
    assert (admitted.cached_tokens, admitted.pooled_tokens, admitted.received_tokens) == (0, 0, 64)
    host.run_publications()
    host.check()


def test_blocks_of_a_failed_handoff_are_published(host: InProcessHost) -> None:
    sender = host.prefill[0]
    job = make_work(PROMPT)
    sender.send_item(PrefillOrder(job, needs_no_decode=False))
    while sender.step():
        pass
    sender.send_item(CancelOrder(job.key, Cancelled("the decode node has no room")))
    sender.drop_aborted()
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 4
    host.check()


@pytest.mark.asyncio
async def test_an_unseen_prompt_has_no_cached_tokens_when_decode_is_late(tmp_path: Path) -> None:
    patience = {"silence": 120.0, "stall": 120.0, "progress_timeout": 120.0, "ticket_ttl": 120.0}
    async with pooled_cluster(tmp_path, prefill=1, decode=1, engine="paced", **patience) as cluster:
        before = await read_metric(cluster, inserted_blocks_metric("pool-0"))
        names = ("computed_prefill", "pool", "local_cache")
        known = {
            name: await read_metric(cluster, rf'baton_prompt_tokens_total{{source="{name}"}}')
            for name in names
        }
        cluster.freeze("decode-0")
        async with cluster.stream_generate(list(PROMPT), max_tokens=8, ignore_eos=True) as call:
            # A prompt that prefill serves alone is computed and published behind the first one.
            alone = await cluster.generate(list(range(900, 964)), max_tokens=1, ignore_eos=True)
            assert alone.usage.cached_tokens == 0
            await wait_for_metric(cluster, inserted_blocks_metric("pool-0"), before + 4)
            cluster.resume("decode-0")
            parts = [part async for part in call]
        assert [token for part in parts for token in part.token_ids] == paced_reference_tokens(
            PROMPT, 8
        )
        assert parts[-1].usage.cached_tokens == 0
        sources = {
            name: await read_metric(cluster, rf'baton_prompt_tokens_total{{source="{name}"}}')
            for name in names
        }
        assert {name: sources[name] - known[name] for name in names} == {
            "computed_prefill": 128,
            "pool": 0,
            "local_cache": 0,
        }
