"""One cluster of real processes for all named scenarios, and one whose hand-offs go over gRPC, each
at rest before and after every scenario."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.observed_cluster import ObservedCluster


class SharedCluster:
    """The scene in play: built when first asked for, and again after a test that failed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._open = AsyncExitStack()
        self._cluster: ObservedCluster | None = None
        self._built = 0

    async def get_cluster(self) -> ObservedCluster:
        if self._cluster is None:
            self._built += 1
            self._cluster = await self._open.enter_async_context(
                ObservedCluster.build(self._folder / f"cluster-{self._built}", **self._settings)
            )
        return self._cluster

    async def close(self, *, clean: bool) -> None:
        scene, self._cluster = self._cluster, None
        if scene is not None and not clean:
            scene.cluster.print_logs()
        await self._open.aclose()
        if scene is not None and clean:
            scene.cluster.assert_clean()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def theatre(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedCluster]:
    made = SharedCluster(tmp_path_factory.mktemp("faults"))
    yield made
    await made.close(clean=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def grpc_theatre(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedCluster]:
    over_grpc = {name: {"transport": "grpc"} for name in ("decode-0", "decode-1")}
    made = SharedCluster(tmp_path_factory.mktemp("grpc-faults"), per_node=over_grpc)
    yield made
    await made.close(clean=True)


@pytest_asyncio.fixture(loop_scope="session")
async def scene(theatre: SharedCluster) -> AsyncIterator[ObservedCluster]:
    """The cluster, at rest. Afterwards it must come to rest again by itself, and nobody may have
    got a wrong answer."""
    async with _checked_cluster(theatre) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def grpc_scene(grpc_theatre: SharedCluster) -> AsyncIterator[ObservedCluster]:
    async with _checked_cluster(grpc_theatre) as made:
        yield made


@asynccontextmanager
async def _checked_cluster(theatre: SharedCluster) -> AsyncIterator[ObservedCluster]:
    made = await theatre.get_cluster()
    await made.cluster.wait_all_joined()
    yield made
    try:
        await made.recover_and_check()
    except BaseException:
        await theatre.close(clean=False)
        raise
