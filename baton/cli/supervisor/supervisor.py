"""The processes of one cluster on this machine: started together, restarted, stopped in order."""

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
from baton.process.cores import count_usable_cores
from baton.shared_memory.segment import remove_stale_segments

_CHECK_INTERVAL = 1.0  # seconds between checks for frozen and silent children


class Supervisor:
    """A running cluster, made by `running_cluster`."""

    def __init__(
        self,
        config: Config,
        output: ChildOutput,
        notify: Callable[[str], None],
        extra_environ: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.config = config
        self.endpoints: Endpoints = cluster_endpoints(config)
        specs = make_child_specs(
            config,
            self.endpoints,
            environ=os.environ,
            cores=count_usable_cores(),
            supervisor=os.getpid(),
        )
        specs = tuple(
            replace(spec, environ={**spec.environ, **extra_environ.get(spec.name, {})})
            for spec in specs
        )
        self._children = [ChildProcess(spec, output, notify) for spec in specs]

    def get_pids(self) -> dict[str, int]:
        """Return the pids of the running children by name."""
        return {child.spec.name: child.pid for child in self._children if child.pid is not None}

    async def wait_until_ready(self) -> None:
        """Return once the coordinator serves: a warm-up token has gone through the cluster."""
        await wait_until_serving(self.endpoints.grpc)
        for child in self._children:
            child.is_starting = False

    async def run(self) -> None:
        """Run all children until `stop()`. Raises what the first failing child raises."""
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_children())
            await asyncio.wait([group.create_task(child.run()) for child in self._children])
            watch.cancel()

    async def stop(self) -> None:
        """Stop the coordinator, then the nodes, then the pool.

        The coordinator refuses new requests and waits for running ones. All nodes stop at once,
        each of which may drain as long. The pool goes last, because the nodes use it.
        """
        coordinator, *others = self._children
        drain_seconds = self.config.drain_timeout + TERM_GRACE_SECONDS
        await coordinator.stop(drain_seconds)
        for is_optional, timeout_seconds in ((False, drain_seconds), (True, TERM_GRACE_SECONDS)):
            await asyncio.gather(
                *(
                    child.stop(timeout_seconds)
                    for child in others
                    if child.spec.is_optional is is_optional
                )
            )

    async def _watch_children(self) -> None:
        max_silent_checks = self.config.liveness_timeout / _CHECK_INTERVAL
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            for child in self._children:
                try:
                    child.kill_if_frozen(clock.monotonic_clock())
                    child.abort_if_unresponsive(max_silent_checks, _CHECK_INTERVAL)
                except Exception as error:  # a failed check must not end the checks
                    log.get_logger("up").error(
                        "checking a child process failed",
                        child=child.spec.name,
                        **log.get_error_fields(error),
                    )


@asynccontextmanager
async def running_cluster(
    config: Config,
    output: ChildOutput,
    notify: Callable[[str], None],
    extra_environ: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> AsyncIterator[Supervisor]:
    """Run a cluster for the length of the block, which starts before the cluster is ready.

    `config` is complete and its ports are real and reserved. `extra_environ` adds variables to
    single children, by name. Raises ConfigError or NodeFailed (in an exception group) when a child
    cannot start. Afterwards no child is left, and no segment of a dead Baton process.
    """
    supervisor = Supervisor(config, output, notify, extra_environ)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            try:
                yield supervisor
            finally:
                await supervisor.stop()
    finally:
        remove_stale_segments(Path(config.segment_dir))
