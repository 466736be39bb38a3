"""Rounds of random faults on real processes, each checked against the six invariants of tests/history.py.

`make test` plays ten, `make chaos` two hundred. A failure names its seed and the command that plays it again.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.arena import Arena
from tests.chaos.rounds import draw
from tests.chaos.stages import build, names, stage_of
from tests.linked_cluster import LinkedCluster

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    rounds, first, only = option("--chaos-rounds"), option("--chaos-seed"), option("--chaos-stage")
    if only and only not in names():
        raise pytest.UsageError(f"--chaos-stage is {only!r}: it must be one of {', '.join(names())}")
    plays = [(only or stage_of(number, rounds), first + number) for number in range(rounds)]
    metafunc.parametrize(("stage", "seed"), plays, ids=[f"{stage}-{seed}" for stage, seed in plays])


class Stages:
    """The cluster of the stage in play. It is kept from round to round, and made anew after a round that failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._cluster: LinkedCluster | None = None
        self._arena: Arena | None = None
        self._open = AsyncExitStack()
        self._opened = 0

    async def arena(self, name: str, seed: int) -> Arena:
        if self._arena is None or self._name != name:
            await self.close()
            stage = build(name, self._folder)
            self._opened += 1
            self._cluster = LinkedCluster(self._folder / f"cluster-{self._opened}", seed=seed, **stage.settings)
            await self._open.enter_async_context(self._cluster)
            self._arena, self._name = Arena(self._cluster, stage.load), name
        return self._arena

    async def abandon(self) -> None:
        """After a failure: show what the processes said."""
        if self._cluster is not None:
            self._cluster.print_logs()
        self._arena = None
        await self._open.aclose()

    async def close(self) -> None:
        await self._open.aclose()
        if self._arena is not None and self._cluster is not None:
            self._cluster.assert_clean()
        self._arena = None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stages]:
    made = Stages(tmp_path_factory.mktemp("chaos"))
    yield made
    await made.close()


async def test_a_round(stage: str, seed: int, stages: Stages) -> None:
    arena = await stages.arena(stage, seed)
    one = draw(seed, arena.cluster.processes, tuple(arena.cluster.links))
    try:
        wrong = await arena.play(one)
    except BaseException:
        await stages.abandon()
        raise
    if wrong:
        await stages.abandon()
        again = f"pytest tests/chaos --chaos-stage={stage} --chaos-rounds=1 --chaos-seed={seed}"
        pytest.fail("\n".join([str(one), *wrong, f"again: {again}"]), pytrace=False)
