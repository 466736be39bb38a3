"""Processes are killed and stopped: others continue, and blocks of a process are freed once it is
proven dead.

What a process may still read or write is not reused."""

import asyncio
import signal
import threading
from itertools import count
from typing import Any

import pytest

from baton.kv.pool_types import PoolHit
from kv_pool.common.block_rows import BlockRows
from tests.pool.conftest import PoolTestHost
from tests.pool.harness import TIMEOUT_SECONDS, PoolNode, expected_blocks, make_tokens, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1000)
_MISS = PoolHit(None, ())


async def test_nodes_survive_a_killed_pool_and_attach_to_the_next(host: PoolTestHost) -> None:
    """Readers continue, look-ups miss, and nodes attach to the next pool, which is empty."""
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 5)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    host.pool.kill()
    await wait_until("noticed", lambda: not node.client.is_attached)
    assert await node.find_prefix(tokens) == _MISS
    assert not node.client.publish_blocks(
        node.make_publish_request(tokens, node.fill_blocks(tokens), lambda _: None)
    )
    assert node.read_blocks(hit) == expected_blocks(tokens), (
        "the old segment stays mapped as long as it is read"
    )
    host.pool.start()
    await node.wait_until_attached()
    assert await node.find_prefix(tokens) == _MISS
    again = await node.publish_tokens(tokens)
    assert again is not None
    assert again.blocks != hit.blocks, "both segments are mapped, side by side"
    assert node.read_blocks(again) == node.read_blocks(hit) == expected_blocks(tokens)
    node.release_hit(hit)
    node.release_hit(again)
    await wait_until("the old mapping is gone", lambda: len(_mapped_segments(node)) == 1)


async def test_nodes_survive_a_stopped_and_resumed_pool(host: PoolTestHost) -> None:
    node = await host.start_node(lookup_timeout_seconds=0.2)
    tokens = make_tokens(next(_SEEDS), 3)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    host.pool.signal(signal.SIGSTOP)
    try:
        assert await node.find_prefix(tokens) == _MISS, "a look-up waits for nobody"
    finally:
        host.pool.signal(signal.SIGCONT)
    await wait_until("the pool answers again", lambda: node.client.is_attached)
    node.release_hit(hit)
    await host.registrar.wait_for_ledger()  # the late answer's pin is released, too


async def test_pins_of_a_killed_reader_are_freed(host: PoolTestHost) -> None:
    publisher, reader = (
        await host.start_node("prefill-0"),
        await host.start_node_process("decode-0"),
    )
    seed = next(_SEEDS)
    hit = await publisher.publish_tokens(make_tokens(seed, 4))
    assert hit is not None
    publisher.release_hit(hit)
    assert await reader.run_order("find", seed=seed, blocks=4) == 4
    await host.registrar.wait_for_ledger(in_use=4)
    reader.kill()
    await host.registrar.wait_for_ledger()


async def test_places_of_a_publisher_killed_mid_copy_are_freed(host: PoolTestHost) -> None:
    survivor = await host.start_node("decode-0")
    publisher = await host.start_node_process(
        "prefill-0", BATON_FAILPOINTS="pool.copy.before=stop+3"
    )
    seed = next(_SEEDS)
    publisher.send_order("publish", seed=seed, blocks=6)
    await publisher.wait_until_stopped()
    await host.registrar.wait_for_ledger(writing=6)
    assert await survivor.find_prefix(make_tokens(seed, 6)) == _MISS, "nothing of it is readable"
    publisher.kill()
    await host.registrar.wait_for_ledger()
    again = await survivor.publish_tokens(make_tokens(seed, 6))
    assert again is not None
    assert survivor.read_blocks(again) == expected_blocks(make_tokens(seed, 6))
    survivor.release_hit(again)


async def test_blocks_of_a_stopped_reader_are_not_reused(host: PoolTestHost) -> None:
    """Even if much is published and the pool has closed its stream, a reader that resumes reads
    what it was given."""
    publisher, reader = (
        await host.start_node("prefill-0"),
        await host.start_node_process("decode-0"),
    )
    total = (await host.registrar.query_ledger()).total
    seed = next(_SEEDS)
    hit = await publisher.publish_tokens(make_tokens(seed, total // 4))
    assert hit is not None
    publisher.release_hit(hit)
    assert await reader.run_order("find", seed=seed, blocks=total // 4) == total // 4
    reader.signal(signal.SIGSTOP)
    for _ in range(6):
        other = await publisher.publish_tokens(make_tokens(next(_SEEDS), total // 4))
        assert other is not None
        publisher.release_hit(other)
    reader.signal(signal.SIGCONT)
    assert await reader.run_order("read", seed=seed, blocks=total // 4) is True
    assert await reader.run_order("release")


async def test_pins_are_quarantined_while_a_disconnected_reader_lives(host: PoolTestHost) -> None:
    """No look-up goes through the old attachment, and what it reads is not reused. A new
    attachment is possible at once."""
    node = await host.start_node("decode-0")
    total = (await host.registrar.query_ledger()).total
    tokens = make_tokens(next(_SEEDS), total // 2)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    _break_stream(node)
    await wait_until("attached anew", lambda: _count_attachments(node) >= 2)
    await node.wait_until_attached()
    await host.registrar.wait_for_ledger(quarantined=total // 2)
    for _ in range(3):
        other = await node.publish_tokens(make_tokens(next(_SEEDS), total // 2))
        assert other is not None
        node.release_hit(other)
    assert node.read_blocks(hit) == expected_blocks(tokens)
    found = await node.find_prefix(tokens)
    assert len(found.blocks) == total // 2, "others may read what is quarantined"
    node.release_hit(found)
    node.release_hit(hit)
    await host.registrar.wait_for_ledger()
    await wait_until("the old mapping is gone", lambda: len(_mapped_segments(node)) == 1)


async def test_places_are_quarantined_until_a_disconnected_publisher_stops(
    host: PoolTestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, survivor = await host.start_node("prefill-0"), await host.start_node("decode-0")
    tokens = make_tokens(next(_SEEDS), 5)
    ended: asyncio.Future[PoolHit | None] = asyncio.get_running_loop().create_future()
    numbers, come, go, copy = count(), threading.Event(), threading.Event(), BlockRows.copy_block

    def third_waits(rows: BlockRows, *what: Any) -> None:
        if next(numbers) == 2:
            come.set()
            go.wait()
        copy(rows, *what)

    monkeypatch.setattr(BlockRows, "copy_block", third_waits)
    try:
        assert node.client.publish_blocks(
            node.make_publish_request(tokens, node.fill_blocks(tokens), ended.set_result)
        )
        await wait_until("the third block is being copied", come.is_set)
        await host.registrar.wait_for_ledger(writing=5)
        _break_stream(node)
        await host.registrar.wait_for_ledger(quarantined=5)
        assert await survivor.find_prefix(tokens) == _MISS
    finally:
        go.set()
    assert await asyncio.wait_for(ended, 30) is None
    assert next(numbers) == 3, "it has stopped"
    await host.registrar.wait_for_ledger()
    await node.wait_until_attached()
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    assert node.read_blocks(hit) == expected_blocks(tokens)
    node.release_hit(hit)


async def test_corrupt_copy_is_refused(host: PoolTestHost) -> None:
    survivor = await host.start_node("decode-0")
    publisher = await host.start_node_process(
        "prefill-0", BATON_FAILPOINTS="pool.copy.before=corrupt+2*1"
    )
    seed = next(_SEEDS)
    assert await publisher.run_order("publish", seed=seed, blocks=4) is None
    assert await survivor.find_prefix(make_tokens(seed, 4)) == _MISS
    await host.registrar.wait_for_ledger()
    assert await publisher.run_order("publish", seed=seed, blocks=4) == 4
    found = await survivor.find_prefix(make_tokens(seed, 4))
    assert survivor.read_blocks(found) == expected_blocks(make_tokens(seed, 4))
    survivor.release_hit(found)


async def test_publication_succeeds_again_after_the_pool_died_before_its_answer(
    host: PoolTestHost,
) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 3)
    await host.registrar.arm_failpoints("pool.seal.after=exit*1")
    assert await node.publish_tokens(tokens) is None
    await asyncio.to_thread(host.pool.process.wait, TIMEOUT_SECONDS)
    host.pool.start()
    await wait_until("attached anew", lambda: _count_attachments(node) >= 2)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    assert node.read_blocks(hit) == expected_blocks(tokens)
    node.release_hit(hit)


async def test_pool_shuts_down_on_sigterm(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 3)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    await host.registrar.arm_failpoints("link.node.send=delay(0.05)")  # the last message as well
    host.pool.process.terminate()
    assert await asyncio.to_thread(host.pool.process.wait, TIMEOUT_SECONDS) == 0
    await wait_until("noticed", lambda: not node.client.is_attached)
    await wait_until("told", lambda: host.registrar.has_left)
    assert node.read_blocks(hit) == expected_blocks(tokens)
    node.release_hit(hit)


def _count_attachments(node: PoolNode) -> int:
    """Return the number of attachments so far; the last one is in use."""
    return (
        int(node.client.counters()["baton_pool_attachments_total"])
        if node.client.is_attached
        else 0
    )


def _mapped_segments(node: PoolNode) -> list[str]:
    """Return the segments of pools that this node has mapped."""
    return [span.segment for span in node.space.address_map._spans if "-pool-" in span.segment]


def _break_stream(node: PoolNode) -> None:
    line = node.client._connection
    assert line is not None
    line.stream.close("broken by a test")
