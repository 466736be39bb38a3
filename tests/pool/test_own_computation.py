"""What a request computes itself is never a hit: neither for its decode node, nor for a later attempt."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import Cancelled
from node_engine.core.messages import Cancel, GiveTicket, Prefill, Submit
from node_engine.paced import paced_reference
from tests.pool.cluster import inserted, metric, pooled_cluster, reaches
from tests.pool.nodes import Host, reference
from tests.unit.roles.bench import WRITER, work

PROMPT = tuple(range(100, 164))  # 64 tokens: four full blocks


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, num_blocks=64)
    yield made
    made.close()


def test_a_decode_node_that_looks_late_does_not_find_its_own_attempt(host: Host) -> None:
    """Prefill has computed everything before the decode node hears of the request."""
    sender, receiver = host.prefill[0], host.decode[0]
    job = work(PROMPT)
    sender.tell(Prefill(job, alone=False))
    while sender.step():
        pass
    host.settle()
    assert len(host.pool.core.memory.index) == 0, "nothing is published before the decode node has answered"
    receiver.tell(Submit(job, WRITER))
    assert receiver.take("reserved")[0].held_tokens == 0
    (ticket,) = receiver.plane.granted.values()
    sender.tell(GiveTicket(ticket))
    host.settle()
    assert len(host.pool.core.memory.index) == 4, "and then at once"
    host.land(sender, receiver, job.key)
    while receiver.step():
        pass
    assert receiver.output(job.key) == reference(job)
    admitted = receiver.take("admitted")[0]
    assert (admitted.cached_tokens, admitted.pooled_tokens, admitted.received_tokens) == (0, 0, 64)
    host.settle()
    host.check()


def test_what_was_computed_for_a_hand_off_that_fails_is_published(host: Host) -> None:
    sender = host.prefill[0]
    job = work(PROMPT)
    sender.tell(Prefill(job, alone=False))
    while sender.step():
        pass
    sender.tell(Cancel(job.key, Cancelled("the decode node has no room")))
    sender.let_go()
    host.settle()
    assert len(host.pool.core.memory.index) == 4
    host.check()


@pytest.mark.asyncio
async def test_an_unseen_prompt_has_no_cached_tokens_when_decode_is_late(tmp_path: Path) -> None:
    patience = {"silence": 120.0, "stall": 120.0, "progress_timeout": 120.0, "ticket_ttl": 120.0}
    async with pooled_cluster(tmp_path, prefill=1, decode=1, engine="paced", **patience) as cluster:
        before = await metric(cluster, inserted("pool-0"))
        names = ("computed_prefill", "pool", "local_cache")
        known = {name: await metric(cluster, rf'baton_prompt_tokens_total{{source="{name}"}}') for name in names}
        cluster.stop("decode-0")
        async with cluster.streaming(list(PROMPT), max_tokens=8, ignore_eos=True) as call:
            # A prompt that prefill serves alone is computed and published behind the first one.
            alone = await cluster.generate(list(range(900, 964)), max_tokens=1, ignore_eos=True)
            assert alone.usage.cached_tokens == 0
            await reaches(cluster, inserted("pool-0"), before + 4)
            cluster.cont("decode-0")
            parts = [part async for part in call]
        assert [token for part in parts for token in part.token_ids] == paced_reference(PROMPT, 8)
        assert parts[-1].usage.cached_tokens == 0
        came = {name: await metric(cluster, rf'baton_prompt_tokens_total{{source="{name}"}}') for name in names}
        assert {name: came[name] - known[name] for name in names} == {
            "computed_prefill": 128,
            "pool": 0,
            "local_cache": 0,
        }
