"""A node's client against the pool's process: looking up, publishing, letting go."""

import asyncio
from collections.abc import Callable
from itertools import count

import pytest

from baton.block_hash import root_hash
from baton.pool_terms import PoolHit
from kv_pool.terms import RETRY
from tests.pool.conftest import Host
from tests.pool.rig import DIGEST, LAYOUT, Node, expected, tokens_of, until
from tests.pool.rig import node as other_node

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1)


async def test_what_one_node_publishes_another_reads_in_place(host: Host) -> None:
    writer, reader = await host.node("prefill-0"), await host.node("decode-0")
    tokens = tokens_of(next(_SEEDS), 6, extra=3)
    published = await writer.publish(tokens)
    assert published is not None
    found = await reader.find(tokens)
    assert reader.read(found) == writer.read(published) == expected(tokens)
    ledger = await host.registrar.settled(in_use=6)
    assert {owner.owner.split("/")[0] for owner in ledger.owners} == {"prefill-0", "decode-0"}
    writer.release(published)
    reader.release(found)
    await host.registrar.settled(in_use=0)


async def test_a_prefix_is_found_as_far_as_it_goes_and_no_further_than_wanted(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 4)
    hit = await node.publish(tokens)
    assert hit is not None
    size = LAYOUT.block_size
    for wanted, blocks in ((len(tokens), 4), (2 * size, 2), (2 * size - 1, 1), (0, 0)):
        found = await node.find(tokens, wanted, partial=False)
        assert found.blocks == hit.blocks[:blocks]
        node.release(found)
    longer = await node.find((*tokens, 1, 2, 3, 4, 5))
    assert longer.blocks == hit.blocks
    assert longer.partial is None
    node.release(longer)
    assert await node.find(tokens_of(next(_SEEDS), 4)) == PoolHit(None, ())
    node.release(hit)


async def test_the_block_that_goes_on_is_told_with_the_tokens_that_agree(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 3)
    hit = await node.publish(tokens)
    assert hit is not None
    found = await node.find((*tokens[:-1], 32001, 7))
    assert found.blocks == hit.blocks[:2]
    assert found.partial == (hit.blocks[2], LAYOUT.block_size - 1)
    node.release(found)
    node.release(hit)


async def test_another_salt_finds_nothing(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 3)
    hit = await node.publish(tokens)
    assert hit is not None
    assert await node.find(tokens, root=root_hash(DIGEST, LAYOUT, b"another tenant")) == PoolHit(None, ())
    node.release(hit)


async def test_what_was_there_already_is_named_instead_of_written_again(host: Host) -> None:
    first, second = await host.node("prefill-0"), await host.node("prefill-1")
    tokens = tokens_of(next(_SEEDS), 5)
    there = await first.publish(tokens[: 3 * LAYOUT.block_size])
    assert there is not None
    rest = await second.publish(tokens)
    assert rest is not None
    assert rest.blocks[:3] == there.blocks
    assert second.read(rest) == expected(tokens)
    again = await first.publish(tokens)
    assert again is not None
    assert again.blocks == rest.blocks
    assert second.client.counters()["baton_pool_published_blocks_total"] == 2
    for node, hit in ((first, there), (second, rest), (first, again)):
        node.release(hit)
    await host.registrar.settled()


async def test_a_publisher_need_not_have_what_is_there(host: Host) -> None:
    """Decode's way: one block, whose predecessors are in the pool."""
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 4)
    first = await node.publish(tokens[:-4], first=0)
    whole = await node.publish(tokens, first=3, paced=True)
    assert first is not None
    assert whole is not None
    assert len(whole.blocks) == 4
    assert node.read(whole) == expected(tokens)
    stranger = tokens_of(next(_SEEDS), 4)
    assert await node.publish(stranger, first=3) is None, "what precedes it is not there"
    node.release(first)
    node.release(whole)


async def test_a_pin_is_released_once(host: Host) -> None:
    node = await host.node()
    hit = await node.publish(tokens_of(next(_SEEDS), 2))
    assert hit is not None
    assert hit.pin is not None
    node.client.release(hit.pin)
    with pytest.raises(ValueError, match="not held"):
        node.client.release(hit.pin)
    await host.registrar.settled()


async def test_a_pool_of_another_model_refuses_and_says_why(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    await host.node()
    for changed, told in (
        ({"model_digest": "ff" * 32}, "model_digest"),
        ({"host_id": "elsewhere"}, "host_id"),
        ({"layout": LAYOUT.__class__(1, 2, 32, 8, "float32")}, "num_layers"),
    ):
        async with other_node(host.pool.address, host.folder, "stranger", **changed) as stranger:
            await until(told, _said(capsys, told))
            assert not stranger.client.attached
            assert await stranger.find(tokens_of(1, 2)) == PoolHit(None, ())


async def test_a_pool_that_refuses_is_dialled_ever_less_often_and_one_that_is_gone_is_not(host: Host) -> None:
    await host.node()
    async with other_node(host.pool.address, host.folder, "stranger", model_digest="ff" * 32) as stranger:
        await until("refused", lambda: stranger.client._pause > 2 * RETRY)
        dials = stranger.client.counters()["baton_pool_dials_total"]
        assert dials >= 3
        host.pool.kill()
        await until("gone", lambda: stranger.client.counters()["baton_pool_dials_total"] > dials)
        await until("dialled as before", lambda: stranger.client._pause == RETRY)
    host.pool.start()


async def test_a_node_without_the_token_is_not_believed(host: Host) -> None:
    async with other_node(host.pool.address, host.folder, "stranger", token="another") as stranger:
        await until("tried again", lambda: stranger.client.counters()["baton_pool_dials_total"] > 2)
        assert not stranger.client.attached
        assert stranger.client.counters()["baton_pool_attachments_total"] == 0


async def test_the_queue_of_publications_is_bounded(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 1)
    sources = node.fill(tokens)
    ends: list[PoolHit | None] = []
    taken = sum(node.client.publish(node.order(tokens, sources, ends.append)) for _ in range(2000))
    assert taken < 2000
    assert node.client.counters()["baton_pool_publish_dropped_total"] == 2000 - taken
    await until("all taken have ended", lambda: len(ends) == taken)
    for hit in ends:
        assert hit is not None
        node.release(hit)
    await host.registrar.settled()


async def test_callbacks_come_in_the_order_of_the_answers(host: Host) -> None:
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 3)
    sources = node.fill(tokens)
    found: asyncio.Future[PoolHit] = asyncio.get_running_loop().create_future()

    def published(hit: PoolHit | None) -> None:
        assert hit is not None
        looking.append(asyncio.ensure_future(_find_into(node, tokens, found)))
        node.release(hit)

    looking: list[asyncio.Future[None]] = []
    assert node.client.publish(node.order(tokens, sources, published))
    hit = await asyncio.wait_for(found, 30)
    assert len(hit.blocks) == 3
    node.release(hit)


async def test_a_node_that_ends_well_leaves_nothing(host: Host) -> None:
    async with other_node(host.pool.address, host.folder, "decode-9") as ending:
        await ending.attached()
        await host.node("decode-1")
        hit = await ending.publish(tokens_of(next(_SEEDS), 2))
        assert hit is not None
        ending.release(hit)
    await host.registrar.settled()


async def _find_into(node: Node, tokens: tuple[int, ...], found: "asyncio.Future[PoolHit]") -> None:
    found.set_result(await node.find(tokens))


def _said(capsys: pytest.CaptureFixture[str], what: str) -> Callable[[], bool]:
    heard: list[str] = []

    def said() -> bool:
        out, err = capsys.readouterr()
        heard.append(out + err)
        return any(what in text for text in heard)

    return said
