"""The process that hosts roles, one at a time. Start: engine, arena, role, compute thread, health, link. Stop: say so,
let what is held end, then take everything down in the opposite order.

Two kinds of thread meet here: the event loop (the coordinator's stream, health) and the compute thread; a role's
transfer plane brings threads of its own.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton import log, wire
from baton import segment as segments
from baton.advertise import advertised
from baton.block_hash import root_hash
from baton.clock import steady
from baton.config import Config
from baton.coordinator_link import CoordinatorLink
from baton.errors import ConfigError, NodeFailed
from baton.exposure import host_part, require_key
from baton.health_port import HealthPort
from baton.model_files import ModelFiles
from baton.pb import cluster_pb2
from baton.segment import Segment
from baton.types import Incarnation, NodeName, Role, mint_id
from node_engine.core.block_pool import BlockPool
from node_engine.core.messages import Command, CoordinatorLost, Joined
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.sequence import SequenceState
from node_engine.core.step import DeviceLost, Engine
from node_engine.core.victims import POLICIES
from node_engine.host.commands import command_from_pb
from node_engine.host.compute import ComputeThread, WhenIdle
from node_engine.host.engines import build_engine, cache_blocks, cache_memory, model_files
from node_engine.host.inbox import Inbox
from node_engine.host.lookups import Lookups
from node_engine.host.roles import MakeRole, RoleSwitch
from node_engine.host.shared_memory import SharedMemory
from node_engine.pool_port import MakePool
from node_engine.reporter import Reporter
from node_engine.role import NodeParts
from node_engine.sharing import Sharing


async def host_node(
    config: Config, role: Role, makers: Mapping[Role, MakeRole], stop: asyncio.Event, make_pool: MakePool | None = None
) -> None:
    """Run one node, in `role` first, until `stop` is set. `make_pool` makes the client of the host's shared pool, if
    the configuration names one. Raises ConfigError for what a restart would not mend."""
    if not config.coordinator:
        raise ConfigError("coordinator is not set: give --coordinator HOST:PORT")
    require_key("--listen", host_part(config.listen), "cluster_token", config.cluster_token, insecure=config.insecure)
    name = NodeName(config.name or f"{role.value}-{mint_id(32)}")
    log.configure(config.log_level, config.log_format, node=name)
    folder = Path(config.segment_dir)
    segments.sweep(folder)
    cache_memory(config)  # refused before a model is loaded for it
    engine = await asyncio.to_thread(build_engine, config)
    config = await advertised(config, stop)
    if stop.is_set():
        return
    block_bytes = engine.layout.block_bytes
    size = segments.segment_bytes(cache_blocks(config, block_bytes, engine.max_model_len) * block_bytes, block_bytes)
    num_blocks = size // block_bytes
    arena = await asyncio.to_thread(segments.create, folder, "arena", size)
    try:
        memory = SharedMemory(folder, block_bytes, arena) if config.pool and make_pool else None
        reach = memory.reach if memory and engine.reads_in_place else arena.view
        await asyncio.to_thread(_prepare, engine, reach, num_blocks, config.max_batched_tokens, stop)
        if stop.is_set():
            return
        files = await asyncio.to_thread(model_files, config)
        node = _Node(config, role, name, engine, files, arena, num_blocks, makers, memory, make_pool)
        await node.run(stop)
    finally:
        arena.close()


def _prepare(engine: Engine, reach: memoryview, num_blocks: int, max_batched_tokens: int, stop: asyncio.Event) -> None:
    """On a GPU this takes seconds. Raises NodeFailed when the GPU has failed."""
    try:
        engine.bind(reach, num_blocks)
        began = steady()
        engine.warm_up(max_batched_tokens, lambda: not stop.is_set())
    except DeviceLost as error:
        what, _, _ = str(error).partition("\n")  # torch has advice for developers behind it
        raise NodeFailed(f"the GPU failed in the first steps: {what}") from error
    if not stop.is_set():
        log.get("process").info("engine is warm", seconds=round(steady() - began, 3))


class _Node:
    def __init__(
        self,
        config: Config,
        role: Role,
        name: NodeName,
        engine: Engine,
        files: ModelFiles,
        arena: Segment,
        num_blocks: int,
        makers: Mapping[Role, MakeRole],
        memory: SharedMemory | None,
        make_pool: MakePool | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config, self._name, self._engine = config, name, engine
        self._files = files
        self._host_id = config.host_id or segments.host_id(Path(config.segment_dir))
        self._inbox: Inbox[Command | object] = Inbox()
        self._pool = BlockPool(num_blocks, engine.layout.block_size, steady)
        limits = SchedulerLimits(config.max_num_seqs, config.max_batched_tokens, engine.max_model_len)
        self._link = CoordinatorLink(
            self, address=config.coordinator, token=config.cluster_token, silence=config.silence
        )
        self._port = None
        if memory is not None and make_pool is not None:
            self._port = make_pool(memory.parts_for(config, name, self._host_id, engine))
        in_place = memory is None or engine.reads_in_place
        scheduler = Scheduler(
            self._pool,
            limits,
            engine.eos_token_ids,
            POLICIES[config.preemption](),
            copy_in=None if memory is None or in_place else memory.copies.copy,
        )
        sharing = Sharing(
            self._port,
            self._pool,
            scheduler,
            self._inbox.put,
            in_place=in_place,
            copy_seconds=memory.copy_seconds if memory else 0.0,
        )
        self._lookups = Lookups(
            self._port,
            root_of=lambda work: root_hash(engine.model_digest, engine.layout, work.request.cache_salt),
            block_size=engine.layout.block_size,
            epoch=lambda: sharing.epoch,
            deliver=self._inbox.put,
            token_seconds=lambda: sharing.worth.seconds_per_token,
        )
        self._parts = NodeParts(
            config=config,
            name=name,
            host_id=self._host_id,
            engine=engine,
            arena=arena,
            pool=self._pool,
            scheduler=scheduler,
            report=Reporter(name, lambda message: _soon(loop, self._link.send, message)),
            clock=steady,
            sharing=sharing,
            reach=memory.reach if memory else arena.view,
            emit=self._inbox.put,
        )
        self._role = RoleSwitch(self._parts, makers, role, changed=lambda: _soon(loop, self._link.join_anew))
        self._compute = ComputeThread(self._parts, self._inbox, steady)

    async def run(self, stop: asyncio.Event) -> None:
        self._compute.start(self._role)
        health = HealthPort(self._config)
        link: asyncio.Task[None] | None = None
        pool = asyncio.create_task(self._port.run()) if self._port else None
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
            await _ended(link, stopping)
            await health.stop()
            await asyncio.to_thread(self._compute.stop)
            await asyncio.to_thread(self._role.close)
            await _ended(pool)

    async def _leave(self) -> None:
        """Tell the coordinator, and let what is held here end: hand-offs, not only responses."""
        leaving = cluster_pb2.Leaving(reason="stopping")
        self._link.send(cluster_pb2.NodeMessage(incarnation=self._parts.report.incarnation, leaving=leaving))
        loop, idle = asyncio.get_running_loop(), asyncio.Event()
        self._lookups.flush()
        self._inbox.put(WhenIdle(lambda: _soon(loop, idle.set)))
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await idle.wait()
        except TimeoutError:
            log.get("node").warning("leaving with work unfinished", seconds=self._config.drain_timeout)

    # as a member of the cluster

    def joined(self, incarnation: Incarnation) -> None:
        self._deliver(Joined(incarnation))

    def coordinator_lost(self) -> None:
        self._deliver(CoordinatorLost())

    def told(self, message: cluster_pb2.CoordinatorMessage) -> None:
        command = command_from_pb(message)
        if command is not None:
            self._deliver(command)

    def _deliver(self, command: Command) -> None:
        self._role.preview(command)
        self._lookups.take(command)

    def join(self) -> cluster_pb2.Join:
        identity = self._engine.identity
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
            implementation=identity.implementation,
            dtype=identity.dtype,
            quantization=identity.quantization,
            config_digest=self._files.config,
            tokenizer_digest=self._files.tokenizer,
            weights_digest=self._files.weights,
            rejoining=self._parts.report.incarnation,
        )

    def stats(self) -> cluster_pb2.NodeStats:
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
            counters=self._role.counters() | self._compute.device_seconds | self._pool_counters() | log.counters(),
            decode_steps=steps.steps,
            decode_step_seconds=steps.seconds,
            decode_step_sequences=steps.sequences,
            decode_step_tokens=steps.tokens,
            **counts,
        )

    def _pool_counters(self) -> dict[str, float]:
        return self._lookups.counters() | self._parts.sharing.counters() | (self._port.counters() if self._port else {})


async def _ended(*tasks: asyncio.Task[Any] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """From the compute thread to the loop. A loop that has ended has nobody left to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
