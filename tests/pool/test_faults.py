"""Kills and stops, with real processes: survivors go on, what the dead held is freed once they are proven gone, and
what may still be read or written is not used for anything else."""

import asyncio
import signal
import threading
from itertools import count
from typing import Any

import pytest

from baton.pool_terms import PoolHit
from kv_pool.block_rows import BlockRows
from tests.pool.conftest import Host
from tests.pool.rig import PATIENCE, Node, expected, tokens_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1000)
_MISS = PoolHit(None, ())


async def test_the_pool_is_killed(host: Host) -> None:
    """Readers go on, look-ups miss, and the next pool is joined, with nothing in it."""
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 5)
    hit = await node.publish(tokens)
    assert hit is not None
    host.pool.kill()
    await until("noticed", lambda: not node.client.attached)
    assert await node.find(tokens) == _MISS
    assert not node.client.publish(node.order(tokens, node.fill(tokens), lambda _: None))
    assert node.read(hit) == expected(tokens), "the old segment stays mapped as long as it is read"
    host.pool.start()
    await node.attached()
    assert await node.find(tokens) == _MISS
    again = await node.publish(tokens)
    assert again is not None
    assert again.blocks != hit.blocks, "both segments are mapped, side by side"
    assert node.read(again) == node.read(hit) == expected(tokens)
    node.release(hit)
    node.release(again)
    await until("the old mapping is gone", lambda: len(_segments(node)) == 1)


async def test_the_pool_is_stopped_and_wakes(host: Host) -> None:
    node = await host.node(find_patience=0.2)
    tokens = tokens_of(next(_SEEDS), 3)
    hit = await node.publish(tokens)
    assert hit is not None
    host.pool.signal(signal.SIGSTOP)
    try:
        assert await node.find(tokens) == _MISS, "a look-up waits for nobody"
    finally:
        host.pool.signal(signal.SIGCONT)
    await until("the pool answers again", lambda: node.client.attached)
    node.release(hit)
    await host.registrar.settled()  # the late answer's pin is released, too


async def test_a_reader_is_killed_that_holds_pins(host: Host) -> None:
    publisher, reader = await host.node("prefill-0"), await host.process("decode-0")
    seed = next(_SEEDS)
    hit = await publisher.publish(tokens_of(seed, 4))
    assert hit is not None
    publisher.release(hit)
    assert await reader.do("find", seed=seed, blocks=4) == 4
    await host.registrar.settled(in_use=4)
    reader.kill()
    await host.registrar.settled()


async def test_a_publisher_is_killed_in_the_middle_of_a_copy(host: Host) -> None:
    survivor = await host.node("decode-0")
    publisher = await host.process("prefill-0", BATON_FAILPOINTS="pool.copy.before=stop+3")
    seed = next(_SEEDS)
    publisher.order("publish", seed=seed, blocks=6)
    await publisher.stopped()
    await host.registrar.settled(writing=6)
    assert await survivor.find(tokens_of(seed, 6)) == _MISS, "nothing of it is readable"
    publisher.kill()
    await host.registrar.settled()
    again = await survivor.publish(tokens_of(seed, 6))
    assert again is not None
    assert survivor.read(again) == expected(tokens_of(seed, 6))
    survivor.release(again)


async def test_a_stopped_reader_keeps_what_it_reads(host: Host) -> None:
    """However much is published meanwhile, and when its pool has given its stream up: what it reads when it wakes is
    what it was given."""
    publisher, reader = await host.node("prefill-0"), await host.process("decode-0")
    total = (await host.registrar.ledger()).total
    seed = next(_SEEDS)
    hit = await publisher.publish(tokens_of(seed, total // 4))
    assert hit is not None
    publisher.release(hit)
    assert await reader.do("find", seed=seed, blocks=total // 4) == total // 4
    reader.signal(signal.SIGSTOP)
    for _ in range(6):
        other = await publisher.publish(tokens_of(next(_SEEDS), total // 4))
        assert other is not None
        publisher.release(other)
    reader.signal(signal.SIGCONT)
    assert await reader.do("read", seed=seed, blocks=total // 4) is True
    assert await reader.do("release")


async def test_a_reader_whose_stream_broke_keeps_what_it_reads_until_it_has_ended(host: Host) -> None:
    """Its pins are quarantined: no new look-up through the old attachment, no reuse of what it reads. A new attachment
    stands beside it at once."""
    node = await host.node("decode-0")
    total = (await host.registrar.ledger()).total
    tokens = tokens_of(next(_SEEDS), total // 2)
    hit = await node.publish(tokens)
    assert hit is not None
    _break_stream(node)
    await until("attached anew", lambda: _attachments(node) >= 2)
    await node.attached()
    await host.registrar.settled(quarantined=total // 2)
    for _ in range(3):
        other = await node.publish(tokens_of(next(_SEEDS), total // 2))
        assert other is not None
        node.release(other)
    assert node.read(hit) == expected(tokens)
    found = await node.find(tokens)
    assert len(found.blocks) == total // 2, "others may read what is quarantined"
    node.release(found)
    node.release(hit)
    await host.registrar.settled()
    await until("the old mapping is gone", lambda: len(_segments(node)) == 1)


async def test_a_publisher_that_lost_its_stream_keeps_its_places_until_it_has_stopped(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, survivor = await host.node("prefill-0"), await host.node("decode-0")
    tokens = tokens_of(next(_SEEDS), 5)
    ended: asyncio.Future[PoolHit | None] = asyncio.get_running_loop().create_future()
    numbers, come, go, copy = count(), threading.Event(), threading.Event(), BlockRows.copy

    def third_waits(rows: BlockRows, *what: Any) -> None:
        if next(numbers) == 2:
            come.set()
            go.wait()
        copy(rows, *what)

    monkeypatch.setattr(BlockRows, "copy", third_waits)
    try:
        assert node.client.publish(node.order(tokens, node.fill(tokens), ended.set_result))
        await until("the third block is being copied", come.is_set)
        await host.registrar.settled(writing=5)
        _break_stream(node)
        await host.registrar.settled(quarantined=5)
        assert await survivor.find(tokens) == _MISS
    finally:
        go.set()
    assert await asyncio.wait_for(ended, 30) is None
    assert next(numbers) == 3, "it has stopped"
    await host.registrar.settled()
    await node.attached()
    hit = await node.publish(tokens)
    assert hit is not None
    assert node.read(hit) == expected(tokens)
    node.release(hit)


async def test_a_copy_that_is_not_whole_is_refused(host: Host) -> None:
    survivor = await host.node("decode-0")
    publisher = await host.process("prefill-0", BATON_FAILPOINTS="pool.copy.before=corrupt+2*1")
    seed = next(_SEEDS)
    assert await publisher.do("publish", seed=seed, blocks=4) is None
    assert await survivor.find(tokens_of(seed, 4)) == _MISS
    await host.registrar.settled()
    assert await publisher.do("publish", seed=seed, blocks=4) == 4
    found = await survivor.find(tokens_of(seed, 4))
    assert survivor.read(found) == expected(tokens_of(seed, 4))
    survivor.release(found)


async def test_the_pool_dies_between_verifying_and_answering(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 3)
    await host.registrar.arm("pool.seal.after=exit*1")
    assert await node.publish(tokens) is None
    await asyncio.to_thread(host.pool.process.wait, PATIENCE)
    host.pool.start()
    await until("attached anew", lambda: _attachments(node) >= 2)
    hit = await node.publish(tokens)
    assert hit is not None
    assert node.read(hit) == expected(tokens)
    node.release(hit)


async def test_the_pool_is_told_to_stop(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 3)
    hit = await node.publish(tokens)
    assert hit is not None
    host.pool.process.terminate()
    assert await asyncio.to_thread(host.pool.process.wait, PATIENCE) == 0
    await until("noticed", lambda: not node.client.attached)
    await until("told", lambda: host.registrar.left)
    assert node.read(hit) == expected(tokens)
    node.release(hit)


def _attachments(node: Node) -> int:
    """So many, the last of which is in use."""
    return int(node.client.counters()["baton_pool_attachments_total"]) if node.client.attached else 0


def _segments(node: Node) -> list[str]:
    """Of pools, mapped by this node."""
    return [span.segment for span in node.space.map._spans if "-pool-" in span.segment]


def _break_stream(node: Node) -> None:
    line = node.client._line
    assert line is not None
    line.session.end("broken by a test")
