"""Hand-offs to one decode node fail again and again: everybody is served all the same, the pair is kept apart, and it
is found out when it works again."""

import itertools

import pytest

from tests.faults.scene import Scene, call
from tests.history import Closed, Door

UNSEEN = itertools.count(5000)  # decode must not hold the prompt already
SLOWLY = "decode.step.before=delay(0.05)"
CROWD = 6  # at once, so that both decode nodes are asked even if one of them was seen to be slower


async def changed(scene: Scene, state: str) -> float:
    return (await scene.cluster.status()).counters.get(f'baton_breaker_changes_total{{state="{state}"}}', 0.0)


async def answered(scene: Scene) -> None:
    crowd = [scene.ask(call(Door.GRPC_ONCE, 40, 3, salt=next(UNSEEN))) for _ in range(CROWD)]
    assert [(await asked.over()).end for asked in crowd] == [Closed(in_order=True)] * CROWD


async def kept_apart_and_found_out(scene: Scene) -> bool:
    """False if a node has joined anew meanwhile, as on a busy machine it may: it comes with a clean record."""
    opened, closed = await changed(scene, "open"), await changed(scene, "closed")
    joins = await scene.counter("baton_joins_total")
    await scene.cluster.arm("decode-1", SLOWLY)
    await scene.cluster.arm("decode-0", f"transfer.land.before=error;{SLOWLY}")

    async def is_open() -> bool:
        await answered(scene)
        return await changed(scene, "open") > opened

    await scene.until("the pair is kept apart", is_open)
    await scene.cluster.arm("decode-0", SLOWLY)

    async def is_over() -> bool:
        await answered(scene)
        return await changed(scene, "closed") > closed or await scene.counter("baton_joins_total") > joins

    await scene.until("a probe has closed it", is_over)
    await scene.cluster.arm("", "")
    return await changed(scene, "closed") > closed


@pytest.mark.asyncio(loop_scope="session")
async def test_a_broken_pair_is_kept_apart_until_it_works_again(scene: Scene) -> None:
    while not await kept_apart_and_found_out(scene):
        pass
