"""Hand-offs to one decode node fail again and again: everybody is served all the same, the pair is kept apart, and it
is found out when it works again."""

import itertools

import pytest

from tests.faults.scene import Scene, call
from tests.history import Closed, Door

UNSEEN = itertools.count(5000)  # decode must not hold the prompt already


async def changed(scene: Scene, state: str) -> float:
    return (await scene.cluster.status()).counters.get(f'baton_breakers_total{{state="{state}"}}', 0.0)


async def answered(scene: Scene) -> None:
    """Two at once, so that both decode nodes are asked."""
    crowd = [scene.ask(call(Door.GRPC_ONCE, 40, 3, salt=next(UNSEEN))) for _ in range(2)]
    assert [(await asked.over()).end for asked in crowd] == [Closed(in_order=True)] * 2


@pytest.mark.asyncio(loop_scope="session")
async def test_a_broken_pair_is_kept_apart_until_it_works_again(scene: Scene) -> None:
    opened, closed = await changed(scene, "open"), await changed(scene, "closed")
    await scene.cluster.arm("decode-0", "transfer.land.before=error")

    async def is_open() -> bool:
        await answered(scene)
        return await changed(scene, "open") > opened

    await scene.until("the pair is kept apart", is_open)
    await scene.cluster.arm("decode-0", "")

    async def is_closed() -> bool:
        await answered(scene)
        return await changed(scene, "closed") > closed

    await scene.until("a probe has closed it", is_closed)
