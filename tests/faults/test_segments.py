"""Shared memory outlives nobody for long: none is left after an orderly end, nor after a kill -9 and the next start."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from baton.segment import PREFIX
from tests.cluster import UP, Cluster
from tests.faults.scene import Scene, call
from tests.history import Door
from tests.processes import wait_for_end


def segments(scene: Scene) -> set[str]:
    return {path.name for path in scene.cluster.segment_dir.glob(f"{PREFIX}*")}


async def test_a_cluster_killed_at_work_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    async with Scene.build(tmp_path / "cluster") as scene:
        cluster = scene.cluster
        first = segments(scene)
        for salt in range(8):
            scene.ask(call(Door.SSE, 200, 800, salt=salt))
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


async def test_a_supervisor_killed_at_work_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Its children die with it; the next one finds their segments and sweeps them."""
    settings: dict[str, Any] = {"engine": "paced", "kv_memory": "2MiB", "prefill": 1, "decode": 1}
    async with Cluster(tmp_path, supervised=True, **settings) as cluster:
        first = {path.name for path in cluster.segment_dir.iterdir()}
        children = [os.pidfd_open(pid) for name, pid in cluster.pids().items() if name != UP]
        assert children
        cluster.kill(UP)
        for child in children:
            assert await asyncio.to_thread(wait_for_end, child, 60.0)
        assert {path.name for path in cluster.segment_dir.iterdir()} == first
        cluster.start(UP)
        await cluster.ready()
        assert (await cluster.generate(range(2, 40), max_tokens=3, temperature=0)).finish == "length"
        after = {path.name for path in cluster.segment_dir.iterdir()}
        assert not after & first
        assert len(after) == len(first)
    cluster.assert_clean()
