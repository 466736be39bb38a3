"""Runs the parts of a node, and ends them in reverse order.

Start: compute thread, health port, coordinator link. Stop: announce it, let attempts end, send the
last reports, then close everything. The event loop (coordinator link, health port) and the compute
thread meet here; a role's transfer plane has its own threads.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.messages import NodeLeaving
from baton.network.health_port import HealthPort
from baton.process import log
from baton.process.runtime import prepare_to_serve
from baton.process.startup import STARTUP
from node_engine.core.node_commands import NodeCommand
from node_engine.host.cache_memory import CacheMemory
from node_engine.host.command_stages import CommandStages
from node_engine.host.compute_thread import (
    CacheMemoryExhausted,
    CallWhenIdle,
    ComputeInbox,
    ComputeThread,
    SwitchableRole,
)
from node_engine.roles.role_policy import RoleContext
from node_engine.shared_pool.pool_client import SharedPoolClient


class NodeRuntime:
    """The parts of one node that have a life: `run` starts and ends them."""

    def __init__(
        self,
        context: RoleContext,
        inbox: ComputeInbox[NodeCommand | object],
        role: SwitchableRole,
        compute_thread: ComputeThread,
        stages: CommandStages,
        pool_client: SharedPoolClient | None,
        link: CoordinatorLink,
        cache_memory: CacheMemory,
    ) -> None:
        self._uses_gpu = context.engine.compute_device.device != "cpu"
        self._config = context.config
        self._reporter = context.reporter
        self._inbox = inbox
        self._role = role
        self._compute_thread = compute_thread
        self._stages = stages
        self._pool_client = pool_client
        self._link = link
        self._cache_memory = cache_memory

    async def run(self, stop: asyncio.Event) -> None:
        prepare_to_serve(uses_gpu=self._uses_gpu)
        self._compute_thread.start(self._role)
        health = HealthPort(self._config)
        link: asyncio.Task[None] | None = None
        pool = asyncio.create_task(self._pool_client.run()) if self._pool_client else None
        stopping = asyncio.create_task(stop.wait())
        try:
            await health.start()
            log.get_logger("node").info(
                "serving", role=self._role.role.value, health_port=health.port, pid=os.getpid()
            )
            STARTUP.finish("assembly")
            link = asyncio.create_task(self._link.run())
            self._cache_memory.start_allocation(lambda: self._inbox.put(CacheMemoryExhausted()))
            await asyncio.wait({link, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
            await health.announce_shutdown()
            await self._leave_cluster()
        finally:
            await _cancel_tasks(link, stopping)
            await health.stop()
            await asyncio.to_thread(self._compute_thread.stop)
            await asyncio.to_thread(self._role.close)
            await _cancel_tasks(pool)
            self._stages.close()

    async def _leave_cluster(self) -> None:
        """Announce the shutdown, wait until all attempts have ended, and close the link in order.

        Attempts include hand-offs.
        """
        self._link.send(NodeLeaving("stopping"), self._reporter.incarnation)
        loop, idle = asyncio.get_running_loop(), asyncio.Event()
        self._stages.release_all()
        self._inbox.put(CallWhenIdle(lambda: call_on_loop(loop, idle.set)))
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await idle.wait()
        except TimeoutError:
            log.get_logger("node").warning(
                "drain timed out, stopping with unfinished work", seconds=self._config.drain_timeout
            )
        await self._link.close()


async def _cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object
) -> None:
    """Call a function on the event loop from another thread; ignored if the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
