"""A pool that was killed is in use again within a second of being back: `make test` kills it once, `make soak` twenty
times, and judges the time."""

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from tests.pool.rig import PoolProcess, expected, node, tokens_of, until
from tests.soak.conftest import Figures

LONG = 10_000  # --pool-operations, from which on times are judged
KILLS = 20
REJOINED = 1.0  # seconds from when the new pool takes connections


@pytest.mark.timeout(600)
async def test_a_pool_that_is_back_is_rejoined(request: pytest.FixtureRequest, figures: Figures) -> None:
    judged = int(request.config.getoption("--pool-operations")) >= LONG
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    try:
        with PoolProcess(folder, log_level="error") as pool:
            async with node(pool.address, folder, "prefill-0") as first, node(pool.address, folder) as second:
                taken = []
                for kill in range(KILLS if judged else 1):
                    await asyncio.gather(first.attached(), second.attached())
                    pool.kill()
                    await until("noticed", lambda: not (first.client.attached or second.client.attached))
                    pool.start()
                    await _listening(pool)
                    back = time.monotonic()
                    await asyncio.gather(first.attached(), second.attached())
                    taken.append(time.monotonic() - back)
                    tokens = tokens_of(kill, 3)
                    published = await first.publish(tokens)
                    assert published is not None
                    found = await second.find(tokens)
                    assert second.read(found) == expected(tokens)
                    first.release(published)
                    second.release(found)
    finally:
        shutil.rmtree(folder)
    told = f"{statistics.median(taken):.2f} s, at most {max(taken):.2f} s"
    figures.append(
        (f"{len(taken)} kills of the pool", "until its nodes are back, from when it takes connections", told)
    )
    if judged:
        assert max(taken) <= REJOINED


async def _listening(pool: PoolProcess) -> None:
    host, _, port = pool.address.rpartition(":")
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return
