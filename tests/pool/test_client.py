"""A node's client against the pool's process: look-ups, publications and releases."""

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from baton.kv.blocks import root_hash
from baton.kv.pool_types import PoolHit
from kv_pool.common.protocol import RETRY_SECONDS
from tests.pool.conftest import PoolTestHost
from tests.pool.harness import (
    DIGEST,
    LAYOUT,
    TIMEOUT_SECONDS,
    PoolNode,
    expected_blocks,
    make_tokens,
    wait_until,
)
from tests.pool.harness import run_pool_node as other_node

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1)


async def test_what_one_node_publishes_another_reads_in_place(host: PoolTestHost) -> None:
    writer, reader = await host.start_node("prefill-0"), await host.start_node("decode-0")
    tokens = make_tokens(next(_SEEDS), 6, extra=3)
    published = await writer.publish_tokens(tokens)
    assert published is not None
    found = await reader.find_prefix(tokens)
    assert reader.read_blocks(found) == writer.read_blocks(published) == expected_blocks(tokens)
    ledger = await host.registrar.wait_for_ledger(in_use=6)
    assert {owner.owner.split("/")[0] for owner in ledger.owners} == {"prefill-0", "decode-0"}
    writer.release_hit(published)
    reader.release_hit(found)
    await host.registrar.wait_for_ledger(in_use=0)


async def test_longest_prefix_is_found_up_to_max_tokens(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 4)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    size = LAYOUT.block_size
    for max_tokens, blocks in ((len(tokens), 4), (2 * size, 2), (2 * size - 1, 1), (0, 0)):
        found = await node.find_prefix(tokens, max_tokens, partial=False)
        assert found.blocks == hit.blocks[:blocks]
        node.release_hit(found)
    longer = await node.find_prefix((*tokens, 1, 2, 3, 4, 5))
    assert longer.blocks == hit.blocks
    assert longer.partial_block is None
    node.release_hit(longer)
    assert await node.find_prefix(make_tokens(next(_SEEDS), 4)) == PoolHit(None, ())
    node.release_hit(hit)


async def test_partial_block_is_reported_with_its_matching_tokens(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 3)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    found = await node.find_prefix((*tokens[:-1], 32001, 7))
    assert found.blocks == hit.blocks[:2]
    assert found.partial_block == (hit.blocks[2], LAYOUT.block_size - 1)
    node.release_hit(found)
    node.release_hit(hit)


async def test_lookup_with_another_salt_is_a_miss(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 3)
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    assert await node.find_prefix(
        tokens, root=root_hash(DIGEST, LAYOUT, b"another tenant")
    ) == PoolHit(None, ())
    node.release_hit(hit)


async def test_blocks_already_in_the_pool_are_not_copied_again(host: PoolTestHost) -> None:
    first, second = await host.start_node("prefill-0"), await host.start_node("prefill-1")
    tokens = make_tokens(next(_SEEDS), 5)
    there = await first.publish_tokens(tokens[: 3 * LAYOUT.block_size])
    assert there is not None
    rest = await second.publish_tokens(tokens)
    assert rest is not None
    assert rest.blocks[:3] == there.blocks
    assert second.read_blocks(rest) == expected_blocks(tokens)
    again = await first.publish_tokens(tokens)
    assert again is not None
    assert again.blocks == rest.blocks
    assert second.client.counters()["baton_pool_published_blocks_total"] == 2
    for node, hit in ((first, there), (second, rest), (first, again)):
        node.release_hit(hit)
    await host.registrar.wait_for_ledger()


async def test_published_blocks_are_counted_when_the_publication_ends(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 3)
    ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_done(hit: PoolHit | None) -> None:
        assert hit is not None
        node.release_hit(hit)
        ended.set_result(node.client.counters()["baton_pool_published_blocks_total"])

    request = node.make_publish_request(tokens, node.fill_blocks(tokens), on_done)
    assert node.client.publish_blocks(request)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        assert await ended == 3


async def test_publisher_needs_only_the_missing_blocks(host: PoolTestHost) -> None:
    """As a decode node does: it publishes one block whose predecessors are in the pool."""
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 4)
    first = await node.publish_tokens(tokens[:-4], first=0)
    whole = await node.publish_tokens(tokens, first=3, is_rate_limited=True)
    assert first is not None
    assert whole is not None
    assert len(whole.blocks) == 4
    assert node.read_blocks(whole) == expected_blocks(tokens)
    stranger = make_tokens(next(_SEEDS), 4)
    assert await node.publish_tokens(stranger, first=3) is None, "what precedes it is not there"
    node.release_hit(first)
    node.release_hit(whole)


async def test_a_pin_is_released_once(host: PoolTestHost) -> None:
    node = await host.start_node()
    hit = await node.publish_tokens(make_tokens(next(_SEEDS), 2))
    assert hit is not None
    assert hit.pin is not None
    node.client.release_pin(hit.pin)
    with pytest.raises(ValueError, match="not held"):
        node.client.release_pin(hit.pin)
    await host.registrar.wait_for_ledger()


async def test_pool_of_another_model_refuses_with_the_field(
    host: PoolTestHost, capfd: pytest.CaptureFixture[str]
) -> None:
    await host.start_node()
    for changed, reason in (
        ({"model_digest": "ff" * 32}, "model_digest"),
        ({"host_id": "elsewhere"}, "host_id"),
        ({"layout": LAYOUT.__class__(1, 2, 32, 8, "float32")}, "num_layers"),
    ):
        async with other_node(host.pool.address, host.folder, "stranger", **changed) as stranger:
            await wait_until(reason, _has_printed(capfd, reason))
            assert not stranger.client.is_attached
            assert await stranger.find_prefix(make_tokens(1, 2)) == PoolHit(None, ())


async def test_redial_backs_off_on_refusal_but_not_on_disconnect(host: PoolTestHost) -> None:
    await host.start_node()
    async with other_node(
        host.pool.address, host.folder, "stranger", model_digest="ff" * 32
    ) as stranger:
        await wait_until("refused", lambda: stranger.client._redial_seconds > 2 * RETRY_SECONDS)
        dials = stranger.client.counters()["baton_pool_dials_total"]
        assert dials >= 3
        host.pool.kill()
        await wait_until(
            "gone", lambda: stranger.client.counters()["baton_pool_dials_total"] > dials
        )
        await wait_until(
            "dialled as before", lambda: stranger.client._redial_seconds == RETRY_SECONDS
        )
    host.pool.start()


async def test_node_with_wrong_token_never_attaches(host: PoolTestHost) -> None:
    async with other_node(host.pool.address, host.folder, "stranger", token="another") as stranger:
        await wait_until(
            "tried again", lambda: stranger.client.counters()["baton_pool_dials_total"] > 2
        )
        assert not stranger.client.is_attached
        assert stranger.client.counters()["baton_pool_attachments_total"] == 0


async def test_the_queue_of_publications_is_bounded(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 1)
    sources = node.fill_blocks(tokens)
    ends: list[PoolHit | None] = []
    taken = sum(
        node.client.publish_blocks(node.make_publish_request(tokens, sources, ends.append))
        for _ in range(2000)
    )
    assert taken < 2000
    assert node.client.counters()["baton_pool_publish_dropped_total"] == 2000 - taken
    await wait_until("all taken have ended", lambda: len(ends) == taken)
    for hit in ends:
        assert hit is not None
        node.release_hit(hit)
    await host.registrar.wait_for_ledger()


async def test_callbacks_come_in_the_order_of_the_answers(host: PoolTestHost) -> None:
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 3)
    sources = node.fill_blocks(tokens)
    found: asyncio.Future[PoolHit] = asyncio.get_running_loop().create_future()

    def published(hit: PoolHit | None) -> None:
        assert hit is not None
        looking.append(asyncio.ensure_future(_find_into(node, tokens, found)))
        node.release_hit(hit)

    looking: list[asyncio.Future[None]] = []
    assert node.client.publish_blocks(node.make_publish_request(tokens, sources, published))
    hit = await asyncio.wait_for(found, 30)
    assert len(hit.blocks) == 3
    node.release_hit(hit)


async def test_clean_shutdown_releases_everything(host: PoolTestHost) -> None:
    async with other_node(host.pool.address, host.folder, "decode-9") as ending:
        await ending.wait_until_attached()
        await host.start_node("decode-1")
        hit = await ending.publish_tokens(make_tokens(next(_SEEDS), 2))
        assert hit is not None
        ending.release_hit(hit)
    await host.registrar.wait_for_ledger()


async def _find_into(
    node: PoolNode, tokens: tuple[int, ...], found: "asyncio.Future[PoolHit]"
) -> None:
    found.set_result(await node.find_prefix(tokens))


def _has_printed(capfd: pytest.CaptureFixture[str], text: str) -> Callable[[], bool]:
    heard: list[str] = []

    def said() -> bool:
        out, err = capfd.readouterr()
        heard.append(out + err)
        return any(text in line for line in heard)

    return said
