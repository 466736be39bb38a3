"""Rounds of random faults on real processes, each checked against the six invariants of
tests/history_checks.py.

`make test` plays ten, `make chaos` two hundred. A failure names its seed and the command that plays
it again.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.round_runner import RoundRunner
from tests.chaos.rounds import draw_round
from tests.chaos.stages import build_stage, choose_stage, list_stages
from tests.proxied_cluster import ProxiedCluster

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    rounds, first, only = option("--chaos-rounds"), option("--chaos-seed"), option("--chaos-stage")
    if only and only not in list_stages():
        raise pytest.UsageError(
            f"--chaos-stage is {only!r}: it must be one of {', '.join(list_stages())}"
        )
    plays = [(only or choose_stage(number, rounds), first + number) for number in range(rounds)]
    metafunc.parametrize(("stage", "seed"), plays, ids=[f"{stage}-{seed}" for stage, seed in plays])


class StageCluster:
    """The cluster of the present stage: kept from round to round, and rebuilt after a failed
    round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._cluster: ProxiedCluster | None = None
        self._runner: RoundRunner | None = None
        self._open = AsyncExitStack()
        self._opened = 0

    async def get_runner(self, name: str, seed: int) -> RoundRunner:
        if self._runner is None or self._name != name:
            await self.close()
            stage = build_stage(name, self._folder)
            self._opened += 1
            self._cluster = ProxiedCluster(
                self._folder / f"cluster-{self._opened}", seed=seed, **stage.settings
            )
            await self._open.enter_async_context(self._cluster)
            self._runner, self._name = RoundRunner(self._cluster, stage.load), name
        return self._runner

    async def discard_cluster(self) -> None:
        """Print the logs of the processes after a failure."""
        if self._cluster is not None:
            self._cluster.print_logs()
        self._runner = None
        await self._open.aclose()

    async def close(self) -> None:
        await self._open.aclose()
        if self._runner is not None and self._cluster is not None:
            self._cluster.assert_clean()
        self._runner = None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StageCluster]:
    made = StageCluster(tmp_path_factory.mktemp("chaos"))
    yield made
    await made.close()


async def test_chaos_round_keeps_the_invariants(
    stage: str, seed: int, stage_cluster: StageCluster
) -> None:
    runner = await stage_cluster.get_runner(stage, seed)
    one = draw_round(seed, runner.cluster.process_names, tuple(runner.cluster.proxies))
    try:
        wrong = await runner.run_round(one)
    except BaseException:
        await stage_cluster.discard_cluster()
        raise
    if wrong:
        await stage_cluster.discard_cluster()
        again = f"pytest tests/chaos --chaos-stage={stage} --chaos-rounds=1 --chaos-seed={seed}"
        pytest.fail("\n".join([str(one), *wrong, f"again: {again}"]), pytrace=False)
