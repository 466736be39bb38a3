"""The processes of one cluster on this machine, started together, kept running, and stopped in
order."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from baton.cli.client.health_watch import wait_until_serving
from baton.cli.supervisor.child_output import ChildOutput
from baton.cli.supervisor.child_process import ChildProcess
from baton.cli.supervisor.child_specs import make_child_specs
from baton.cli.supervisor.ports import Endpoints, cluster_endpoints
from baton.cli.supervisor.restart_policy import TERM_GRACE_SECONDS
from baton.config.settings import Config
from baton.process import clock, log
from baton.shared_memory.segment import remove_stale_segments

_CHECK_INTERVAL = 1.0  # seconds between looks for children that stand still


class Supervisor:
    """What a caller sees of a running cluster. Made by `running`."""

    def __init__(
        self,
        config: Config,
        output: ChildOutput,
        tell: Callable[[str], None],
        own: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.config = config
        self.endpoints: Endpoints = cluster_endpoints(config)
        specs = make_child_specs(
            config,
            self.endpoints,
            environ=os.environ,
            cores=len(os.sched_getaffinity(0)),
            supervisor=os.getpid(),
        )
        specs = tuple(
            replace(spec, environ={**spec.environ, **own.get(spec.name, {})}) for spec in specs
        )
        self._children = [ChildProcess(spec, output, tell) for spec in specs]

    def get_pids(self) -> dict[str, int]:
        """Pid by name of the children that run at this moment."""
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}

    async def wait_until_ready(self) -> None:
        """Return once the coordinator serves: a warm-up token has gone through the whole
        cluster."""
        await wait_until_serving(self.endpoints.grpc)
        for child in self._children:
            child.is_starting = False

    async def run(self) -> None:
        """Run all children until `stop()`. Raises what `ChildProcess.run` raises, for the first
        that cannot start."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_children())
            await asyncio.wait([group.create_task(child.run()) for child in self._children])
            watch.cancel()

    async def stop(self) -> None:
        """The coordinator first: it refuses what is new and waits for what runs. Then the nodes,
        all at once, each of which may drain as long, and the pool that they use."""
        coordinator, *others = self._children
        drain = self.config.drain_timeout + TERM_GRACE_SECONDS
        await coordinator.stop(drain)
        for pools, patience in ((False, drain), (True, TERM_GRACE_SECONDS)):
            await asyncio.gather(
                *(one.stop(patience) for one in others if one.spec.is_optional is pools)
            )

    async def _watch_children(self) -> None:
        looks = self.config.liveness_timeout / _CHECK_INTERVAL
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            for child in self._children:
                try:
                    child.kill_if_frozen(clock.monotonic_clock())
                    child.abort_if_unresponsive(looks, _CHECK_INTERVAL)
                except Exception as error:  # a look that fails must not be the last one
                    log.get_logger("up").error(
                        "a look at a child failed",
                        child=child.spec.name,
                        **log.get_error_fields(error),
                    )


@asynccontextmanager
async def running_cluster(
    config: Config,
    output: ChildOutput,
    tell: Callable[[str], None],
    own: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> AsyncIterator[Supervisor]:
    """A cluster for the length of the block, ready or not yet. `config` is complete and its ports
    are real and held. `own` adds to the environment of single children, by name.

    Raises (in an exception group) ConfigError or NodeFailed when a child cannot start. Afterwards
    no child is left, and no segment that any dead process of ours held.
    """
    supervisor = Supervisor(config, output, tell, own)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            try:
                yield supervisor
            finally:
                await supervisor.stop()
    finally:
        remove_stale_segments(Path(config.segment_dir))
