"""No shared memory is left after an orderly end, nor after SIGKILL and the next start."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from baton.shared_memory.segment import SEGMENT_PREFIX
from tests.cluster import SUPERVISOR, Cluster
from tests.faults.observed_cluster import ObservedCluster, make_call
from tests.history import ClientApi
from tests.processes import wait_for_exit


def list_segments(observed: ObservedCluster) -> set[str]:
    return {path.name for path in observed.cluster.segment_dir.glob(f"{SEGMENT_PREFIX}*")}


async def test_killed_cluster_leaves_no_segments_after_a_restart(tmp_path: Path) -> None:
    async with ObservedCluster.build(tmp_path / "cluster") as observed:
        cluster = observed.cluster
        first = list_segments(observed)
        for salt in range(8):
            observed.start_call(make_call(ClientApi.SSE, 200, 800, salt=salt))
        await observed.wait_blocks("in_use")
        for name in cluster.process_names:
            cluster.send_signal(name, signal.SIGKILL)
        for name in cluster.process_names:
            await cluster.wait_for_exit(name)
        observed.was_coordinator_killed = True
        assert list_segments(observed) == first  # a killed process cannot clean up
        await observed.recover_and_check()
        assert not list_segments(observed) & first
        assert len(list_segments(observed)) == len(first)
        cluster.kill("decode-0")
        await (
            observed.recover_and_check()
        )  # nor does one that is started again leave its former self behind
        assert len(list_segments(observed)) == len(first)
        assert (await cluster.get_ledgers()).ledgers
    cluster.assert_clean()


async def test_killed_supervisor_leaves_no_segments_after_a_restart(tmp_path: Path) -> None:
    """Its children die with it; the next supervisor removes their segments."""
    settings: dict[str, Any] = {"engine": "paced", "kv_memory": "2MiB", "prefill": 1, "decode": 1}
    async with Cluster(tmp_path, supervised=True, **settings) as cluster:
        first = {path.name for path in cluster.segment_dir.iterdir()}
        children = [
            os.pidfd_open(pid) for name, pid in cluster.get_pids().items() if name != SUPERVISOR
        ]
        assert children
        cluster.kill(SUPERVISOR)
        for child in children:
            assert await asyncio.to_thread(wait_for_exit, child, 60.0)
        assert {path.name for path in cluster.segment_dir.iterdir()} == first
        cluster.start(SUPERVISOR)
        await cluster.wait_ready()
        assert (
            await cluster.generate(range(2, 40), max_tokens=3, temperature=0)
        ).finish_reason == "length"
        after = {path.name for path in cluster.segment_dir.iterdir()}
        assert not after & first
        assert len(after) == len(first)
    cluster.assert_clean()
