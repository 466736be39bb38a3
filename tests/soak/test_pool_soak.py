"""A pool and four users for a long time, all of them killed and stopped at random: nobody ever reads a block that is
torn or somebody else's, and at the end nothing is held or left behind.

`make test` runs a slice of a few hundred operations, `make soak` a hundred thousand. `--soak-seed` repeats what is
done.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from baton import segment as segments
from tests.pool.registrar import Registrar
from tests.pool.rig import PoolProcess
from tests.soak.conftest import Figures
from tests.soak.pool_scene import FAULTS, PoolScene

LONG = 10_000  # operations, from which on rare things must have happened
FAULT_EVERY = 400  # operations; in a slice, so many that there are four or so


@pytest.mark.timeout(2400)
async def test_a_pool_under_random_kills(request: pytest.FixtureRequest, figures: Figures) -> None:
    operations = int(request.config.getoption("--pool-operations"))
    seed = int(request.config.getoption("--soak-seed"))
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    try:
        began = time.monotonic()
        async with Registrar.open() as registrar:
            with PoolProcess(folder, coordinator=registrar.address, name="pool-0", log_level="error") as pool:
                scene = PoolScene(pool, registrar, seed, min(FAULT_EVERY, operations // 4))
                try:
                    await scene.play(operations)
                finally:
                    await scene.kill_all()
                counters = dict(registrar.stats.counters)
        seconds = time.monotonic() - began
        segments.sweep(folder)  # of users that were killed
        assert scene.wrong == []
        assert os.listdir(folder) == [], "segments were left behind"
    finally:
        shutil.rmtree(folder)
    assert scene.did["operations"] >= operations
    assert scene.did["hits"] > 0
    assert scene.did["blocks read"] > 0
    if operations >= LONG:
        assert counters['baton_pool_evictions_total{tier="memory"}'] > 0
        assert min(scene.did[fault] for fault in FAULTS) > 0
    deed = f"{operations:,} operations, seed {seed}"
    figures.append((deed, "time", f"{seconds:.0f} s"))
    if scene.rejoined:
        told = f"{statistics.median(scene.rejoined):.2f} s, at most {max(scene.rejoined):.2f} s"
        figures.append((deed, "from a pool's start until it has joined again", told))
    figures.extend((deed, what, f"{count:,}") for what, count in sorted(scene.did.items()))
