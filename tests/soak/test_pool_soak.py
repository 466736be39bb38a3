"""A pool and four users that are killed and stopped at random, for a long time.

No user ever reads a torn or wrong block, and at the end nothing is held or left behind. `make
test` runs a few hundred operations, `make soak` many thousands."""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from baton.shared_memory import segment as segments
from tests.pool.fake_coordinator import FakePoolCoordinator
from tests.pool.harness import PoolProcess
from tests.soak.conftest import Figures
from tests.soak.pool_fault_run import FAULTS, PoolFaultRun

JUDGED_OPERATIONS = 10_000  # operations, from which on rare things must have happened
OPERATIONS_PER_FAULT = 400  # operations; in a slice, so many that there are four or so


@pytest.mark.timeout(2400)
async def test_blocks_stay_whole_under_random_kills(
    request: pytest.FixtureRequest, figures: Figures
) -> None:
    operations = int(request.config.getoption("--pool-operations"))
    seed = int(request.config.getoption("--soak-seed"))
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    try:
        began = time.monotonic()
        async with FakePoolCoordinator.open() as registrar:
            with PoolProcess(
                folder, coordinator=registrar.address, name="pool-0", log_level="error"
            ) as pool:
                run = PoolFaultRun(
                    pool, registrar, seed, min(OPERATIONS_PER_FAULT, operations // 4)
                )
                try:
                    await run.run_operations(operations)
                finally:
                    await run.kill_all()
                counters = dict(registrar.stats.counters)
        seconds = time.monotonic() - began
        segments.remove_stale_segments(folder)  # of users that were killed
        assert run.errors == []
        assert os.listdir(folder) == [], "segments were left behind"
    finally:
        shutil.rmtree(folder)
    assert run.counts["operations"] >= operations
    assert run.counts["hits"] > 0
    assert run.counts["blocks read"] > 0
    if operations >= JUDGED_OPERATIONS:
        assert counters['baton_pool_evictions_total{tier="memory"}'] > 0
        assert min(run.counts[fault] for fault in FAULTS) > 0
    deed = f"{operations:,} operations, seed {seed}"
    figures.append((deed, "time", f"{seconds:.0f} s"))
    if run.rejoin_seconds:
        median, longest = statistics.median(run.rejoin_seconds), max(run.rejoin_seconds)
        told = f"{median:.2f} s, at most {longest:.2f} s"
        figures.append((deed, "from a pool's start until it has joined again", told))
    figures.extend((deed, what, f"{count:,}") for what, count in sorted(run.counts.items()))
