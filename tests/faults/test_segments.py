"""Shared memory outlives nobody for long: none is left after an orderly end, nor after a kill -9 and the next start."""

import signal
from pathlib import Path

from baton.segment import PREFIX
from tests.faults.scene import Scene, call
from tests.history import Door


def segments(scene: Scene) -> set[str]:
    return {path.name for path in scene.cluster.segment_dir.glob(f"{PREFIX}*")}


async def test_a_cluster_killed_at_work_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    async with Scene.build(tmp_path / "cluster") as scene:
        cluster = scene.cluster
        first = segments(scene)
        for salt in range(8):
            scene.ask(call(Door.SSE, 200, 200, salt=salt))
        await scene.until_blocks("in_use")
        for name in cluster.processes:
            cluster.signal(name, signal.SIGKILL)
        for name in cluster.processes:
            await cluster.ended(name)
        scene.coordinator_died = True
        assert segments(scene) == first  # a killed process cannot clean up
        await scene.settle()
        assert not segments(scene) & first
        assert len(segments(scene)) == len(first)
        cluster.kill("decode-0")
        await scene.settle()  # nor does one that is started again leave its former self behind
        assert len(segments(scene)) == len(first)
        assert (await cluster.ledgers()).ledgers
    cluster.assert_clean()
