"""A restarted pool is in use again within a second: `make test` kills it once, `make soak`
twenty times and checks the time."""

import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from tests.pool.harness import PoolProcess, expected_blocks, make_tokens, run_pool_node, wait_until
from tests.soak.conftest import Figures

JUDGED_OPERATIONS = 10_000  # --pool-operations, from which on times are judged
KILLS = 20
MAX_REJOIN_SECONDS = 1.0  # seconds from when the new pool takes connections


@pytest.mark.timeout(600)
async def test_restarted_pool_is_rejoined_within_a_second(
    request: pytest.FixtureRequest, figures: Figures
) -> None:
    judged = int(request.config.getoption("--pool-operations")) >= JUDGED_OPERATIONS
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    try:
        with PoolProcess(folder, log_level="error") as pool:
            async with (
                run_pool_node(pool.address, folder, "prefill-0") as first,
                run_pool_node(pool.address, folder) as second,
            ):
                taken = []
                for kill in range(KILLS if judged else 1):
                    await asyncio.gather(first.wait_until_attached(), second.wait_until_attached())
                    pool.kill()
                    await wait_until(
                        "noticed",
                        lambda: not (first.client.is_attached or second.client.is_attached),
                    )
                    pool.start()
                    await _wait_listening(pool)
                    back = time.monotonic()
                    await asyncio.gather(first.wait_until_attached(), second.wait_until_attached())
                    taken.append(time.monotonic() - back)
                    tokens = make_tokens(kill, 3)
                    published = await first.publish_tokens(tokens)
                    assert published is not None
                    found = await second.find_prefix(tokens)
                    assert second.read_blocks(found) == expected_blocks(tokens)
                    first.release_hit(published)
                    second.release_hit(found)
    finally:
        shutil.rmtree(folder)
    told = f"{statistics.median(taken):.2f} s, at most {max(taken):.2f} s"
    figures.append(
        (
            f"{len(taken)} kills of the pool",
            "until its nodes are back, from when it takes connections",
            told,
        )
    )
    if judged:
        assert max(taken) <= MAX_REJOIN_SECONDS


async def _wait_listening(pool: PoolProcess) -> None:
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
