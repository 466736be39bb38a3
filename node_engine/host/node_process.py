"""The node process, which hosts one role at a time.

Start: engine, arena, role, compute thread, health port, coordinator link. Stop: announce it, let
attempts end, then close everything in reverse order.

The event loop (coordinator link, health port) and the compute thread meet here; a role's transfer
plane has its own threads.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.cluster_link.messages import PROTOCOL_VERSION, JoinInfo, NodeOrder
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError, NodeFailed
from baton.kv.block_hash import root_hash
from baton.models.file_digests import ModelFileDigests
from baton.network.advertised_address import with_advertised_address
from baton.network.bind_policy import get_endpoint_host, require_key_unless_loopback
from baton.network.health_port import HealthPort
from baton.pb import cluster_pb2
from baton.process import log
from baton.process.clock import monotonic_clock
from baton.shared_memory import segment as segments
from baton.shared_memory.segment import Segment
from baton.types import Incarnation, NodeName, Role, mint_id
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.node_commands import CoordinatorLost, NodeCommand, NodeJoined
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.preemption import PREEMPTION_POLICIES
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.sequence import SequenceState
from node_engine.core.step.step_batch import DeviceLost, Engine
from node_engine.host.compute_thread import CallWhenIdle, ComputeInbox, ComputeThread
from node_engine.host.engine_factory import (
    build_engine,
    compute_cache_blocks,
    compute_cache_bytes,
    load_model_files,
)
from node_engine.host.role_switch import RoleFactory, SwitchableRole
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from node_engine.roles.role_policy import RoleContext
from node_engine.shared_pool.pool_client import NodeAddressSpace, PoolClientFactory
from node_engine.shared_pool.pool_connector import PoolConnector, PoolLookups


async def run_node(
    config: NodeConfig,
    role: Role,
    role_factories: Mapping[Role, RoleFactory],
    stop: asyncio.Event,
    make_pool_client: PoolClientFactory | None = None,
) -> None:
    """Run one node that starts in `role` until `stop` is set.

    `make_pool_client` builds the client of the host's shared pool, if the configuration names one.
    Raises ConfigError for errors that a restart cannot fix.
    """
    if not config.coordinator:
        raise ConfigError("coordinator is not set: give --coordinator HOST:PORT")
    require_key_unless_loopback(
        "--listen",
        get_endpoint_host(config.listen),
        "cluster_token",
        config.cluster_token,
        insecure=config.insecure,
    )
    name = NodeName(config.name or f"{role.value}-{mint_id(32)}")
    log.configure_logging(config.log_level, config.log_format, node=name)
    folder = Path(config.segment_dir)
    segments.remove_stale_segments(folder)
    compute_cache_bytes(config)  # fail before a model is loaded
    engine = await asyncio.to_thread(build_engine, config)
    config = await with_advertised_address(config, stop)
    if stop.is_set():
        return
    block_bytes = engine.layout.block_bytes
    size = segments.round_up_segment_bytes(
        compute_cache_blocks(config, block_bytes, engine.max_model_len) * block_bytes, block_bytes
    )
    num_blocks = size // block_bytes
    arena = await asyncio.to_thread(segments.create_segment, folder, "arena", size)
    try:
        memory = (
            NodeAddressSpace(folder, block_bytes, arena)
            if config.pool and make_pool_client
            else None
        )
        block_memory = (
            memory.block_memory if memory and engine.can_read_pool_in_place else arena.view
        )
        await asyncio.to_thread(
            _prepare_engine, engine, block_memory, num_blocks, config.max_batched_tokens, stop
        )
        if stop.is_set():
            return
        files = await asyncio.to_thread(load_model_files, config)
        node = _NodeProcess(
            config,
            role,
            name,
            engine,
            files,
            arena,
            num_blocks,
            role_factories,
            memory,
            make_pool_client,
        )
        await node.run(stop)
    finally:
        arena.close()


def _prepare_engine(
    engine: Engine,
    block_memory: memoryview,
    num_blocks: int,
    max_batched_tokens: int,
    stop: asyncio.Event,
) -> None:
    """Bind the cache and warm up; on a GPU this takes seconds. Raises NodeFailed if it failed."""
    try:
        engine.bind_cache(block_memory, num_blocks)
        started = monotonic_clock()
        engine.warm_up(max_batched_tokens, lambda: not stop.is_set())
    except DeviceLost as error:
        reason, _, _ = str(error).partition("\n")  # torch adds advice for developers
        raise NodeFailed(f"the GPU failed in the first steps: {reason}") from error
    if not stop.is_set():
        log.get_logger("process").info(
            "engine warm-up finished", seconds=round(monotonic_clock() - started, 3)
        )


class _NodeProcess:
    """The parts of a running node, and its side of the coordinator link."""

    def __init__(
        self,
        config: NodeConfig,
        role: Role,
        name: NodeName,
        engine: Engine,
        files: ModelFileDigests,
        arena: Segment,
        num_blocks: int,
        role_factories: Mapping[Role, RoleFactory],
        memory: NodeAddressSpace | None,
        make_pool_client: PoolClientFactory | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config, self._name, self._engine = config, name, engine
        self._model_files = files
        self._host_id = config.host_id or segments.compute_host_id(Path(config.segment_dir))
        self._inbox: ComputeInbox[NodeCommand | object] = ComputeInbox()
        self._block_pool = BlockPool(num_blocks, engine.layout.block_size, monotonic_clock)
        limits = SchedulerLimits(
            config.max_num_seqs, config.max_batched_tokens, engine.max_model_len
        )
        self._link = CoordinatorLink(
            self, address=config.coordinator, token=config.cluster_token, silence=config.silence
        )
        self._pool_client = None
        if memory is not None and make_pool_client is not None:
            self._pool_client = make_pool_client(
                memory.build_client_context(config, name, self._host_id, engine)
            )
        in_place = memory is None or engine.can_read_pool_in_place
        scheduler = Scheduler(
            self._block_pool,
            limits,
            engine.eos_token_ids,
            PREEMPTION_POLICIES[config.preemption](),
            copy_pool_blocks=None
            if memory is None or in_place
            else memory.block_copier.copy_blocks,
        )
        pool_connector = PoolConnector(
            self._pool_client,
            self._block_pool,
            scheduler,
            self._inbox.put,
            in_place=in_place,
            copy_seconds=memory.seconds_per_block_copy if memory else 0.0,
        )
        self._lookups = PoolLookups(
            self._pool_client,
            root_of=lambda work: root_hash(
                engine.model_digest, engine.layout, work.request.cache_salt
            ),
            block_size=engine.layout.block_size,
            epoch=lambda: pool_connector.publication_epoch,
            deliver=self._inbox.put,
            token_seconds=lambda: pool_connector.copy_cost_model.seconds_per_token,
        )
        self._context = RoleContext(
            config=config,
            name=name,
            host_id=self._host_id,
            engine=engine,
            arena=arena,
            block_pool=self._block_pool,
            scheduler=scheduler,
            reporter=CoordinatorReporter(
                name, lambda message: _call_on_loop(loop, self._link.send, message)
            ),
            clock=monotonic_clock,
            pool_connector=pool_connector,
            block_memory=memory.block_memory if memory else arena.view,
            emit=self._inbox.put,
        )
        self._role = SwitchableRole(
            self._context,
            role_factories,
            role,
            on_changed=lambda: _call_on_loop(loop, self._link.rejoin),
        )
        self._compute_thread = ComputeThread(self._context, self._inbox, monotonic_clock)

    async def run(self, stop: asyncio.Event) -> None:
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
            link = asyncio.create_task(self._link.run())
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

    async def _leave_cluster(self) -> None:
        """Announce the shutdown, then wait until all attempts have ended, hand-offs included."""
        leaving = cluster_pb2.Leaving(reason="stopping")
        self._link.send(
            cluster_pb2.NodeMessage(incarnation=self._context.reporter.incarnation, leaving=leaving)
        )
        loop, idle = asyncio.get_running_loop(), asyncio.Event()
        self._lookups.end_all_lookups()
        self._inbox.put(CallWhenIdle(lambda: _call_on_loop(loop, idle.set)))
        try:
            async with asyncio.timeout(self._config.drain_timeout):
                await idle.wait()
        except TimeoutError:
            log.get_logger("node").warning(
                "drain timed out, stopping with unfinished work", seconds=self._config.drain_timeout
            )

    # callbacks of the coordinator link

    def on_joined(self, incarnation: Incarnation) -> None:
        self._deliver_command(NodeJoined(incarnation))

    def on_coordinator_lost(self) -> None:
        self._deliver_command(CoordinatorLost())

    def on_order(self, order: NodeOrder) -> None:
        self._deliver_command(order)

    def _deliver_command(self, command: NodeCommand) -> None:
        self._role.preview_command(command)
        self._lookups.submit_command(command)

    def build_join(self) -> JoinInfo:
        identity = self._engine.model_identity
        return JoinInfo(
            protocol_version=PROTOCOL_VERSION,
            name=self._name,
            role=self._role.role,
            host_id=self._host_id,
            transfer_endpoint=self._role.transfer_endpoint,
            pid=os.getpid(),
            model_digest=self._engine.model_digest.hex(),
            layout=self._engine.layout,
            num_blocks=self._block_pool.num_blocks,
            max_num_seqs=self._config.max_num_seqs,
            max_batched_tokens=self._config.max_batched_tokens,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            eos_token_ids=self._engine.eos_token_ids,
            engine=self._config.engine,
            implementation=identity.implementation,
            dtype=identity.dtype,
            quantization=identity.quantization,
            files=self._model_files,
            rejoining=self._context.reporter.incarnation,
        )

    def build_stats(self) -> cluster_pb2.NodeStats:
        """Statistics for the heartbeat, read without a lock: at most one step old."""
        load, steps = self._compute_thread.scheduler_load, self._compute_thread.decode_step_totals
        live = load.num_sequences_by_state
        counts = {
            f"blocks_{state.value}": count
            for state, count in self._block_pool.ownership.count_blocks_by_state().items()
        }
        return cluster_pb2.NodeStats(
            blocks_total=self._block_pool.num_blocks,
            waiting=live[SequenceState.WAITING] + live[SequenceState.PREFILLING],
            running=live[SequenceState.RUNNING],
            queued_tokens=load.queued_tokens,
            progress_age_seconds=self._compute_thread.progress_age_seconds,
            counters=self._role.counters()
            | self._compute_thread.device_seconds
            | self._pool_counters()
            | log.get_log_counters(),
            decode_steps=steps.num_steps,
            decode_step_seconds=steps.seconds,
            decode_step_sequences=steps.num_sequences,
            decode_step_tokens=steps.context_tokens,
            **counts,
        )

    def _pool_counters(self) -> dict[str, float]:
        return (
            self._lookups.counters()
            | self._context.pool_connector.counters()
            | (self._pool_client.counters() if self._pool_client else {})
        )


async def _cancel_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object
) -> None:
    """Call a function on the event loop from another thread; ignored if the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
