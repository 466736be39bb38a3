"""Clusters of real processes for all named scenarios, idle before and after each of them.

The KV transfers of one of the two go over gRPC.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.observed_cluster import ObservedCluster


class SharedCluster:
    """A cluster that is built when first used, and again after a test that failed."""

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
        observed, self._cluster = self._cluster, None
        if observed is not None and not clean:
            observed.cluster.print_logs()
        await self._open.aclose()
        if observed is not None and clean:
            observed.cluster.assert_clean()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedCluster]:
    made = SharedCluster(tmp_path_factory.mktemp("faults"))
    yield made
    await made.close(clean=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_grpc_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[SharedCluster]:
    over_grpc = {name: {"transport": "grpc"} for name in ("decode-0", "decode-1")}
    made = SharedCluster(tmp_path_factory.mktemp("grpc-faults"), per_node=over_grpc)
    yield made
    await made.close(clean=True)


@pytest_asyncio.fixture(loop_scope="session")
async def observed(shared_cluster: SharedCluster) -> AsyncIterator[ObservedCluster]:
    """Yield the idle cluster. Afterwards it must become idle again, and no answer was wrong."""
    async with _checked_cluster(shared_cluster) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def observed_over_grpc(shared_grpc_cluster: SharedCluster) -> AsyncIterator[ObservedCluster]:
    async with _checked_cluster(shared_grpc_cluster) as made:
        yield made


@asynccontextmanager
async def _checked_cluster(shared_cluster: SharedCluster) -> AsyncIterator[ObservedCluster]:
    made = await shared_cluster.get_cluster()
    await made.cluster.wait_all_joined()
    yield made
    try:
        await made.recover_and_check()
    except BaseException:
        await shared_cluster.close(clean=False)
        raise
