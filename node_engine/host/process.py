"""The process that hosts roles, one at a time. Start: engine, arena, role, compute thread, health, link. Stop: say so,
let what is held end, then take everything down in the opposite order.

Two kinds of thread meet here: the event loop (the coordinator's stream, health) and the compute thread; a role's
transfer plane brings threads of its own.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from baton import log, wire
from baton import segment as segments
from baton.clock import steady
from baton.config import Config
from baton.errors import ConfigError
from baton.exposure import host_part, require_key
from baton.pb import cluster_pb2
from baton.segment import Segment
from baton.types import NodeName, Role, mint_id
from node_engine.core.block_pool import BlockPool
from node_engine.core.messages import Command
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.sequence import SequenceState
from node_engine.core.step import Engine
from node_engine.core.victims import POLICIES
from node_engine.host.advertise import advertised
from node_engine.host.compute import ComputeThread, WhenIdle
from node_engine.host.coordinator_link import CoordinatorLink
from node_engine.host.engines import build_engine, cache_blocks
from node_engine.host.health import HealthPort
from node_engine.host.inbox import Inbox
from node_engine.host.roles import MakeRole, RoleSwitch
from node_engine.reporter import Reporter
from node_engine.role import NodeParts


async def host_node(config: Config, role: Role, makers: Mapping[Role, MakeRole], stop: asyncio.Event) -> None:
    """Run one node, in `role` first, until `stop` is set. Raises ConfigError for what a restart would not mend."""
    if not config.coordinator:
        raise ConfigError("coordinator is not set: give --coordinator HOST:PORT")
    require_key("--listen", host_part(config.listen), "cluster_token", config.cluster_token, insecure=config.insecure)
    name = NodeName(config.name or f"{role.value}-{mint_id(32)}")
    log.configure(config.log_level, config.log_format, node=name)
    engine = await asyncio.to_thread(build_engine, config)
    config = await advertised(config, stop)
    if stop.is_set():
        return
    folder, block_bytes = Path(config.segment_dir), engine.layout.block_bytes
    segments.sweep(folder)
    size = segments.segment_bytes(cache_blocks(config, block_bytes) * block_bytes, block_bytes)
    num_blocks = size // block_bytes
    arena = await asyncio.to_thread(segments.create, folder, "arena", size)
    try:
        engine.bind(arena.view, num_blocks)
        node = _Node(config, role, name, engine, arena, num_blocks, makers)
        await node.run(stop)
    finally:
        arena.close()


class _Node:
    def __init__(
        self,
        config: Config,
        role: Role,
        name: NodeName,
        engine: Engine,
        arena: Segment,
        num_blocks: int,
        makers: Mapping[Role, MakeRole],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config, self._name, self._engine = config, name, engine
        self._host_id = config.host_id or segments.host_id(Path(config.segment_dir))
        self._inbox: Inbox[Command | object] = Inbox()
        self._pool = BlockPool(num_blocks, engine.layout.block_size, steady)
        limits = SchedulerLimits(config.max_num_seqs, config.max_batched_tokens, engine.max_model_len)
        self._link = CoordinatorLink(
            address=config.coordinator,
            token=config.cluster_token,
            silence=config.silence,
            join=self._join,
            stats=self._stats,
            deliver=self._deliver,
        )
        self._parts = NodeParts(
            config=config,
            name=name,
            host_id=self._host_id,
            engine=engine,
            arena=arena,
            pool=self._pool,
            scheduler=Scheduler(self._pool, limits, engine.eos_token_ids, POLICIES[config.preemption]()),
            report=Reporter(name, lambda message: _soon(loop, self._link.send, message)),
            clock=steady,
            emit=self._inbox.put,
        )
        self._role = RoleSwitch(self._parts, makers, role, changed=lambda: _soon(loop, self._link.join_anew))
        self._compute = ComputeThread(self._parts, self._inbox, steady)

    async def run(self, stop: asyncio.Event) -> None:
        self._compute.start(self._role)
        health = HealthPort(self._config)
        link: asyncio.Task[None] | None = None
        stopping = asyncio.create_task(stop.wait())
        try:
            await health.start()
            log.get("node").info("serving", role=self._role.role.value, health_port=health.port, pid=os.getpid())
            link = asyncio.create_task(self._link.run())
            await asyncio.wait({link, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
            await health.leaving()
            await self._leave()
        finally:
            tasks = [task for task in (link, stopping) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await health.stop()
            await asyncio.to_thread(self._compute.stop)
            await asyncio.to_thread(self._role.close)

    async def _leave(self) -> None:
        """Tell the coordinator, and let what is held here end: hand-offs, not only responses."""
        leaving = cluster_pb2.Leaving(reason="stopping")
        self._link.send(cluster_pb2.NodeMessage(incarnation=self._parts.report.incarnation, leaving=leaving))
        loop, idle = asyncio.get_running_loop(), asyncio.Event()
        self._inbox.put(WhenIdle(lambda: _soon(loop, idle.set)))
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await idle.wait()
        except TimeoutError:
            log.get("node").warning("leaving with work unfinished", seconds=self._config.drain_timeout)

    def _deliver(self, command: Command) -> None:
        self._role.preview(command)
        self._inbox.put(command)

    def _join(self) -> cluster_pb2.Join:
        return cluster_pb2.Join(
            protocol_version=wire.PROTOCOL_VERSION,
            name=self._name,
            role=self._role.role.value,
            host_id=self._host_id,
            transfer_endpoint=self._role.transfer_endpoint,
            pid=os.getpid(),
            model_digest=self._engine.model_digest.hex(),
            layout=wire.layout_to_pb(self._engine.layout),
            num_blocks=self._pool.total,
            max_num_seqs=self._config.max_num_seqs,
            max_batched_tokens=self._config.max_batched_tokens,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            eos_token_ids=self._engine.eos_token_ids,
            engine=self._config.engine,
            rejoining=self._parts.report.incarnation,
        )

    def _stats(self) -> cluster_pb2.NodeStats:
        """Read on the event loop without a lock: every figure is one that was true, at most a step ago."""
        load, steps = self._compute.load, self._compute.steps
        live = load.sequences
        counts = {f"blocks_{state.value}": count for state, count in self._pool.counts().items()}
        return cluster_pb2.NodeStats(
            blocks_total=self._pool.total,
            waiting=live[SequenceState.WAITING] + live[SequenceState.PREFILLING],
            running=live[SequenceState.RUNNING],
            queued_tokens=load.queued_tokens,
            progress_age_seconds=self._compute.progress_age,
            counters=self._role.counters() | self._compute.device_seconds,
            decode_steps=steps.steps,
            decode_step_seconds=steps.seconds,
            decode_step_sequences=steps.sequences,
            decode_step_tokens=steps.tokens,
            **counts,
        )


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """From the compute thread to the loop. A loop that has ended has nobody left to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
