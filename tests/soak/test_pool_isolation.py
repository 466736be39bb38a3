"""Whether a tenant can tell by the time that look-ups take what another one has published: the same
look-ups of prompts that the other has published and of prompts that nobody has, in pairs and in
random order.

What is judged is in how many pairs the first kind took longer (the sign test): a half if time tells
nothing. Each of a pair is asked several times in turn with the other, and the quickest answer
counts: other work on the machine only makes them slower. That the method would tell is shown on the
tenant that has published them. `make test` does a few look-ups, and judges that nothing is found;
`make soak` judges times.
"""

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from baton.kv.blocks import BlockHash, compute_packed_hashes, pack_tokens, root_hash
from baton.kv.pool_types import PoolHit
from tests.pool.harness import (
    DIGEST,
    LAYOUT,
    UNSALTED_ROOT,
    PoolNode,
    PoolProcess,
    make_tokens,
    run_pool_node,
)
from tests.soak.conftest import Figures

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER_TENANT_ROOT = root_hash(DIGEST, LAYOUT, b"another tenant")
BLOCKS, PROMPTS = 500, 4  # of each kind; all published ones fit
JUDGED_OPERATIONS = 10_000  # --pool-operations, from which on times are judged
PAIRS, ROUNDS = 600, 7
MAX_ADVANTAGE = 0.12  # from a half: 6 standard errors of so many pairs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asking() -> AsyncIterator[PoolNode]:
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    try:
        with PoolProcess(folder, pool_memory="16MiB", log_level="error") as pool:
            async with run_pool_node(pool.address, folder) as made:
                await made.wait_until_attached()
                yield made
    finally:
        shutil.rmtree(folder)


async def test_lookup_time_does_not_reveal_blocks_of_another_tenant(
    asking: PoolNode, request: pytest.FixtureRequest, figures: Figures
) -> None:
    judged = int(request.config.getoption("--pool-operations")) >= JUDGED_OPERATIONS
    published = [make_tokens(number, BLOCKS) for number in range(PROMPTS)]
    unknown = [make_tokens(100 + number, BLOCKS) for number in range(PROMPTS)]
    for tokens in published:
        hit = await asking.publish_tokens(tokens)
        assert hit is not None
        assert len(hit.blocks) == BLOCKS
        asking.release_hit(hit)
    theirs, found = await _compare_lookups(
        asking, OTHER_TENANT_ROOT, published, unknown, PAIRS if judged else 4
    )
    assert found == 0
    own, found = await _compare_lookups(
        asking, UNSALTED_ROOT, published, unknown, PAIRS // 4 if judged else 4
    )
    assert found > 0
    if judged:
        figures.append(
            (
                "another tenant's prefixes",
                "slower than unknown ones, share of pairs",
                f"{theirs:.3f}",
            )
        )
        figures.append(("own prefixes", "slower than unknown ones, share of pairs", f"{own:.3f}"))
        assert abs(theirs - 0.5) < MAX_ADVANTAGE
        if abs(own - 0.5) < 2 * MAX_ADVANTAGE:
            pytest.skip("other work on this machine hides even what one has published oneself")


async def _compare_lookups(
    asking: PoolNode,
    root: BlockHash,
    published: Sequence[Sequence[int]],
    unknown: Sequence[Sequence[int]],
    pairs: int,
) -> tuple[float, int]:
    """In which share of the pairs the look-up of the published prompt took longer, and how many
    found anything."""
    random, slower = Random(0), 0
    questions = [[_make_lookup(root, tokens) for tokens in kind] for kind in (published, unknown)]
    found = 0
    for number in range(pairs):
        quickest = [math.inf, math.inf]
        for kind in (kind for _ in range(ROUNDS) for kind in random.sample((0, 1), 2)):
            seconds, hit = await _time_lookup(asking, *questions[kind][number % PROMPTS])
            quickest[kind] = min(quickest[kind], seconds)
            found += hit.pin is not None
            asking.release_hit(hit)
        slower += quickest[0] > quickest[1]
    return slower / pairs, found


def _make_lookup(root: BlockHash, tokens: Sequence[int]) -> tuple[BlockHash, bytes, bytes]:
    packed = pack_tokens(tokens)
    return root, compute_packed_hashes(root, packed, LAYOUT.block_size), packed


async def _time_lookup(
    asking: PoolNode, root: BlockHash, names: bytes, packed: bytes
) -> tuple[float, PoolHit]:
    answered: asyncio.Future[tuple[float, PoolHit]] = asyncio.get_running_loop().create_future()
    began = time.perf_counter()

    def then(hit: PoolHit) -> None:
        answered.set_result((time.perf_counter() - began, hit))

    asking.client.find_prefix(root, names, packed, BLOCKS * LAYOUT.block_size, then)
    return await answered
