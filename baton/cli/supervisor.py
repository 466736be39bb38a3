"""The processes of one cluster on this machine, started together, kept running, and stopped in order."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from baton import clock, log
from baton.cli.child import Child
from baton.cli.health import serving
from baton.cli.output import Output
from baton.cli.plan import children
from baton.cli.ports import Endpoints, endpoints
from baton.cli.restarts import TERM_PATIENCE
from baton.config import Config
from baton.segment import sweep

_LOOK_EVERY = 1.0  # seconds between looks for children that stand still


class Supervisor:
    """What a caller sees of a running cluster. Made by `running`."""

    def __init__(
        self, config: Config, output: Output, tell: Callable[[str], None], own: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.config = config
        self.endpoints: Endpoints = endpoints(config)
        specs = children(
            config,
            self.endpoints,
            environ=os.environ,
            cores=len(os.sched_getaffinity(0)),
            supervisor=os.getpid(),
        )
        specs = tuple(replace(spec, environ={**spec.environ, **own.get(spec.name, {})}) for spec in specs)
        self._children = [Child(spec, output, tell) for spec in specs]

    def pids(self) -> dict[str, int]:
        """Pid by name of the children that run at this moment."""
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}

    async def ready(self) -> None:
        """Return once the coordinator serves: a warm-up token has gone through the whole cluster."""
        await serving(self.endpoints.grpc)
        for child in self._children:
            child.starting = False

    async def keep(self) -> None:
        """Run all children until `stop()`. Raises what `Child.keep` raises, for the first that cannot start."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            await asyncio.wait([group.create_task(child.keep()) for child in self._children])
            watch.cancel()

    async def stop(self) -> None:
        """The coordinator first: it refuses what is new and waits for what runs. Then the nodes, all at once, each of
        which may drain as long, and the pool that they use."""
        coordinator, *others = self._children
        drain = self.config.drain_timeout + TERM_PATIENCE
        await coordinator.stop(drain)
        for pools, patience in ((False, drain), (True, TERM_PATIENCE)):
            await asyncio.gather(*(one.stop(patience) for one in others if one.spec.optional is pools))

    async def _watch(self) -> None:
        looks = self.config.liveness_timeout / _LOOK_EVERY
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            for child in self._children:
                try:
                    child.kill_if_frozen(clock.steady())
                    child.end_if_unresponsive(looks, _LOOK_EVERY)
                except Exception as error:  # a look that fails must not be the last one
                    log.get("up").error("a look at a child failed", child=child.spec.name, **log.describe_error(error))


@asynccontextmanager
async def running(
    config: Config,
    output: Output,
    tell: Callable[[str], None],
    own: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> AsyncIterator[Supervisor]:
    """A cluster for the length of the block, ready or not yet. `config` is complete and its ports are real and held.
    `own` adds to the environment of single children, by name.

    Raises (in an exception group) ConfigError or NodeFailed when a child cannot start. Afterwards no child is left, and
    no segment that any dead process of ours held.
    """
    supervisor = Supervisor(config, output, tell, own)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.keep())
            try:
                yield supervisor
            finally:
                await supervisor.stop()
    finally:
        sweep(Path(config.segment_dir))
