"""Hand-offs to one decode node fail again and again: everybody is served all the same, the pair is kept apart, and it
is found out when it works again."""

import itertools
from pathlib import Path

import pytest

from baton.pb import cluster_pb2 as pb
from tests.answers import cluster_call
from tests.faults.scene import Asked, Scene, call
from tests.history import Closed, Door

UNSEEN = itertools.count(5000)  # decode must not hold the prompt already
PATIENT = {"silence": 60.0, "stall": 60.0, "ticket_ttl": 30.0, "progress_timeout": 30.0}
"""A node that joined anew would have a clean record, and a slow hand-off would be one more that fails."""


async def changed(scene: Scene, state: str) -> float:
    return (await scene.cluster.status()).counters.get(f'baton_breaker_changes_total{{state="{state}"}}', 0.0)


def ask(scene: Scene) -> Asked:
    return scene.ask(call(Door.GRPC_ONCE, 40, 3, salt=next(UNSEEN)))


async def is_served(asked: Asked) -> None:
    assert (await asked.over()).end == Closed(in_order=True)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_broken_pair_is_kept_apart_until_it_works_again(tmp_path: Path) -> None:
    """While decode-1 is drained, every hand-off is between the two nodes that matter."""
    async with Scene.build(tmp_path, **PATIENT) as scene:
        grpc = scene.cluster.grpc
        await scene.cluster.arm("decode-0", "transfer.land.before=error")
        await cluster_call(grpc, "Drain", pb.DrainRequest(node="decode-1"))
        first = ask(scene)

        async def is_open() -> bool:
            return await changed(scene, "open") > 0

        await scene.until("the pair is kept apart", is_open)
        await cluster_call(grpc, "Undrain", pb.UndrainRequest(node="decode-1"))
        await is_served(first)
        for asked in [ask(scene) for _ in range(4)]:
            await is_served(asked)
        assert await changed(scene, "closed") == 0, "no hand-off between them has gone through"

        await scene.cluster.arm("decode-0", "")
        await cluster_call(grpc, "Drain", pb.DrainRequest(node="decode-1"))
        await is_served(ask(scene))
        assert await changed(scene, "closed") == 1, "the request was the probe"
        await cluster_call(grpc, "Undrain", pb.UndrainRequest(node="decode-1"))
        await scene.settle()
    scene.cluster.assert_clean()
