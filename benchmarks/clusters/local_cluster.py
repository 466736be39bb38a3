"""A cluster of real processes for the length of a measurement, run like `baton up`."""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rich.console import Console

from baton.cli.supervisor import child_specs, ports
from baton.cli.supervisor.child_output import LogFiles
from baton.cli.supervisor.gpus import choose_gpus
from baton.cli.supervisor.supervisor import Supervisor, running_cluster
from baton.cli.supervisor.visible_gpus import count_visible_gpus
from baton.config.settings import Config
from benchmarks.clusters.random_models import ModelShape, build_random_model

START_TIMEOUT = 120.0  # seconds
T = TypeVar("T")


@asynccontextmanager
async def start_local_cluster(
    console: Console,
    shape: ModelShape,
    name: str,
    *,
    own: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[Supervisor]:
    """Run a ready cluster that serves a random model of `shape` under `name`.

    See serve_model_folder.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        model = await asyncio.to_thread(build_random_model, Path(folder, name), shape)
        # Allocating the default pool takes seconds and would disturb the measurement.
        settings = {"pool_memory": "256MiB", **settings}
        async with serve_model_folder(console, model, own=own, **settings) as cluster:
            yield cluster


@asynccontextmanager
async def serve_model_folder(
    console: Console,
    model: Path,
    *,
    own: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    start_timeout: float = START_TIMEOUT,
    **settings: Any,
) -> AsyncIterator[Supervisor]:
    """Run a ready cluster that serves a model folder, started within `start_timeout` seconds.

    `own` adds variables to single processes, by name. Nothing is left behind; after a failure the
    logs are kept and their folder is printed.
    """
    folder = Path(tempfile.mkdtemp(prefix="baton-bench-"))
    failed = True
    sockets: list[socket.socket] = []
    logs = LogFiles(folder / "logs")
    try:
        defaults: dict[str, Any] = {
            "port": 0,
            "grpc_port": 0,
            "admin_port": 0,
            "drain_timeout": 5.0,
        }
        config, _ = child_specs.complete_config(
            Config(**{**defaults, **settings, "model": str(model), "state_dir": str(folder)})
        )
        config, _ = choose_gpus(config, count_visible_gpus(config))
        config, sockets = ports.reserve_ports(config)
        async with running_cluster(config, logs, console.print, own) as cluster:
            async with asyncio.timeout(start_timeout):
                await cluster.wait_until_ready()
            yield cluster
        failed = False
    finally:
        logs.close()
        for reserved in sockets:
            reserved.close()
        if failed:
            console.print(f"the logs of the cluster are in {logs.folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def entered_together(*managers: AbstractAsyncContextManager[T]) -> AsyncIterator[list[T]]:
    """Enter managers at the same time, because clusters start slowly; the value has their values.

    Raises what they raise, and what is raised while they are entered, in an ExceptionGroup.
    """
    is_over = asyncio.Event()

    async def hold(manager: AbstractAsyncContextManager[T], entered: asyncio.Future[T]) -> None:
        async with manager as value:
            entered.set_result(value)
            await is_over.wait()

    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        entered: list[asyncio.Future[T]] = [loop.create_future() for _ in managers]
        for manager, future in zip(managers, entered, strict=True):
            group.create_task(hold(manager, future))
        try:
            yield [await future for future in entered]
        finally:
            is_over.set()
