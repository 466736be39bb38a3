"""One cluster of real processes for all named scenarios, and one whose hand-offs go over gRPC, each at rest before and
after every scenario."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.scene import Scene


class Theatre:
    """The scene in play: built when first asked for, and again after a test that failed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._open = AsyncExitStack()
        self._scene: Scene | None = None
        self._built = 0

    async def scene(self) -> Scene:
        if self._scene is None:
            self._built += 1
            self._scene = await self._open.enter_async_context(
                Scene.build(self._folder / f"cluster-{self._built}", **self._settings)
            )
        return self._scene

    async def close(self, *, clean: bool) -> None:
        scene, self._scene = self._scene, None
        if scene is not None and not clean:
            scene.cluster.print_logs()
        await self._open.aclose()
        if scene is not None and clean:
            scene.cluster.assert_clean()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def theatre(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Theatre]:
    made = Theatre(tmp_path_factory.mktemp("faults"))
    yield made
    await made.close(clean=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def grpc_theatre(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Theatre]:
    over_grpc = {name: {"transport": "grpc"} for name in ("decode-0", "decode-1")}
    made = Theatre(tmp_path_factory.mktemp("grpc-faults"), per_node=over_grpc)
    yield made
    await made.close(clean=True)


@pytest_asyncio.fixture(loop_scope="session")
async def scene(theatre: Theatre) -> AsyncIterator[Scene]:
    """The cluster, at rest. Afterwards it must come to rest again by itself, and nobody may have got a wrong answer."""
    async with _played(theatre) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def grpc_scene(grpc_theatre: Theatre) -> AsyncIterator[Scene]:
    async with _played(grpc_theatre) as made:
        yield made


@asynccontextmanager
async def _played(theatre: Theatre) -> AsyncIterator[Scene]:
    made = await theatre.scene()
    await made.cluster.whole()
    yield made
    try:
        await made.settle()
    except BaseException:
        await theatre.close(clean=False)
        raise
