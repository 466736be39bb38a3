"""A node, assembled. Read it from top to bottom:

    launch_node    reads the settings and starts the event loop
    run_node       builds engine and arena, warms up, then assembles the node and runs it
    assemble_node  puts the parts together: block pool, scheduler, shared pool, role, compute
                   thread, coordinator link

What a node is made of is chosen in the functions below these, one for each choice: the arena, the
roles with their transfer planes, the pool client; the engine with its kernels and its sampler is
built by engine_factory.py. As a composition root this file stands above all packages and may import
any of them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cluster_link.coordinator_link import CoordinatorLink
from baton.config import flags as config_flags
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests, compute_file_digests
from baton.models.model_source import with_local_model
from baton.models.weight_cache import resolve_weight_cache
from baton.network.advertised_address import with_advertised_address
from baton.network.bind_policy import (
    get_endpoint_host,
    parse_endpoint,
    require_key_unless_loopback,
)
from baton.process import log
from baton.process.clock import monotonic_clock
from baton.process.entry import run_process
from baton.process.runtime import collector_paused
from baton.process.startup import STARTUP
from baton.shared_memory import segment as segments
from baton.types import NodeName, Role, mint_id
from decode_node.default_limits import DECODE_LIMITS
from decode_node.role_factory import make_decode_role
from kv_pool.client.factory import make_pool_client
from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.device.open_device import open_device, open_writer
from node_engine.core.node_commands import NodeCommand
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.scheduling.step_limits import DeviceType, StepLimits, resolve_step_limits
from node_engine.core.step.engine import Engine
from node_engine.host.command_stages import CommandStages
from node_engine.host.compute_thread import (
    AwaitedMaskComputed,
    ComputeInbox,
    ComputeThread,
    RoleFactory,
    SwitchableRole,
)
from node_engine.host.constraints import make_constraint_factory
from node_engine.host.cpu_kernels import begin_opening_weights
from node_engine.host.device_monitor import DeviceMonitor
from node_engine.host.draft_model import build_drafter, check_draft_settings
from node_engine.host.engine_factory import (
    build_engine,
    node_failed_at_device_loss,
    resolve_device_type,
)
from node_engine.host.engine_measurement import measure_limits
from node_engine.host.host_arena import HostArena, create_host_arena, require_cache_memory
from node_engine.host.node_link_member import NodeLinkMember
from node_engine.host.node_runtime import NodeRuntime, call_on_loop
from node_engine.host.scheduler_factory import make_scheduler
from node_engine.model.loading.packed_weights.store import PackedWeightStore
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from node_engine.roles.role_policy import RoleContext
from node_engine.shared_pool.pool_client import SharedPoolClient
from node_engine.shared_pool.pool_connector import PoolConnector, PoolLookups
from node_engine.structured_output.constrained_orders import ConstrainedOrders
from prefill_node.default_limits import PREFILL_LIMITS
from prefill_node.role_factory import make_prefill_role

if TYPE_CHECKING:  # llguidance is imported only if a model with a tokenizer is served
    from node_engine.structured_output.constraint_factory import ConstraintFactory

DEFAULT_LIMITS = {Role.PREFILL: PREFILL_LIMITS, Role.DECODE: DECODE_LIMITS}


def launch_node(role: Role, argv: Sequence[str] | None = None) -> int:
    """Run a node that starts in `role` until it is stopped; returns the exit code."""

    def settings() -> NodeConfig:
        prog, description = f"python -m {role.value}_node", f"A {role.value} node of Baton."
        return with_local_model(
            config_flags.load_config(argv, NodeConfig, prog=prog, description=description)
        )

    return run_process(settings, lambda config, stop: run_node(config, role, stop))


async def run_node(
    config: NodeConfig,
    role: Role,
    stop: asyncio.Event,
    role_factories: Mapping[Role, RoleFactory] | None = None,
) -> None:
    """Run one node that starts in `role` until `stop` is set.

    Raises ConfigError for errors that a restart cannot fix.
    """
    name = begin_node(config, role)
    with ExitStack() as opened:
        writer = open_writer(config, opened)  # before torch opens files of the GPU
        weights = begin_opening_weights(config, opened)
        constraints = make_constraint_factory(config, opened)
        device = await asyncio.to_thread(import_engine, config)
        STARTUP.end_phase("engine_imports")
        limits = choose_step_limits(config, role, device)
        check_cache_memory(config, device, weights)  # fail before a model is loaded
        engine = await asyncio.to_thread(build_engine, config, device, limits, weights)
        STARTUP.end_phase("model")
        config = await with_advertised_address(config, stop)
        if stop.is_set():
            return
        arena = await asyncio.to_thread(create_arena, config, device, limits, engine)
        opened.callback(arena.close)
        STARTUP.end_phase("arena")
        await asyncio.to_thread(warm_up_engine, engine, arena, limits.max_batched_tokens, stop)
        STARTUP.end_phase("warm_up")
        if stop.is_set():
            return
        measured, limits = await asyncio.to_thread(measure_limits, config, engine, arena, limits)
        drafter = await asyncio.to_thread(build_drafter, config, role, limits, engine, arena)
        files = await asyncio.to_thread(load_model_files, config)
        transfer = await asyncio.to_thread(open_device, config, engine, arena, writer, opened)
        factories = role_factories or make_role_factories(transfer)
        scheduler = make_scheduler(config, limits, measured, engine, arena, drafter)
        node = assemble_node(
            config, role, name, engine, arena, scheduler, constraints, files, factories
        )
        if constraints is not None:
            await asyncio.to_thread(constraints.wait_for_tokenizer)
        await node.run(stop)


def import_engine(config: NodeConfig) -> DeviceType:
    """Import what computes here, which takes seconds for a model; see `resolve_device_type`.

    Only in a process of the node's own: its collector pauses, and never frees what is garbage then.
    """
    with collector_paused():
        return resolve_device_type(config)


def begin_node(config: NodeConfig, role: Role) -> NodeName:
    """Check the settings, configure the log and remove the segments of dead nodes."""
    _check_settings(config)
    name = NodeName(config.name or f"{role.value}-{mint_id(32)}")
    log.configure_logging(config.log_level, config.log_format, node=name)
    segments.remove_stale_segments(Path(config.segment_dir))
    return name


def assemble_node(
    config: NodeConfig,
    role: Role,
    name: NodeName,
    engine: Engine,
    arena: HostArena,
    scheduler: Scheduler,
    constraints: "ConstraintFactory | None",
    model_files: ModelFileDigests,
    role_factories: Mapping[Role, RoleFactory],
) -> NodeRuntime:
    """Put the parts of a node together. Nothing runs yet; called on the event loop."""
    loop = asyncio.get_running_loop()
    inbox: ComputeInbox[NodeCommand | object] = ComputeInbox()
    host_id = config.host_id or segments.compute_host_id(Path(config.segment_dir))
    pool_client = connect_pool_client(config, name, host_id, engine, arena)
    reporter = CoordinatorReporter(
        name,
        lambda *report: call_on_loop(loop, link.send, *report),  # `link` is made last
    )
    context = make_role_context(
        config, host_id, engine, arena, scheduler, pool_client, reporter, inbox
    )
    stages = make_command_stages(context, pool_client, constraints, inbox)
    if stages.constrained_orders is not None:
        context = replace(context, constraints=stages.constrained_orders)
    switchable_role = SwitchableRole(
        context, role_factories, role, on_changed=lambda: call_on_loop(loop, link.rejoin)
    )
    compute_thread = ComputeThread(context, inbox, monotonic_clock, stages.submit_command)
    devices = DeviceMonitor(engine, monotonic_clock)
    member = NodeLinkMember(
        context, switchable_role, compute_thread, stages, pool_client, model_files, devices
    )
    link = make_coordinator_link(config, member, compute_thread)
    return NodeRuntime(
        context, inbox, switchable_role, compute_thread, stages, pool_client, link, arena.memory
    )


def make_coordinator_link(
    config: NodeConfig, member: NodeLinkMember, compute_thread: ComputeThread
) -> CoordinatorLink:
    return CoordinatorLink(
        member,
        on_order=compute_thread.submit_command,
        address=config.coordinator,
        token=config.cluster_token,
        silence=config.silence,
    )


def make_role_context(
    config: NodeConfig,
    host_id: str,
    engine: Engine,
    arena: HostArena,
    scheduler: Scheduler,
    pool_client: SharedPoolClient | None,
    reporter: CoordinatorReporter,
    inbox: ComputeInbox[NodeCommand | object],
) -> RoleContext:
    """What the compute thread works with: blocks, scheduler, engine, shared pool."""
    pool_connector = PoolConnector(
        pool_client,
        scheduler.block_pool,
        scheduler,
        inbox.put,
        save_blocks=engine.save_blocks,
        in_place=arena.reads_pool_in_place,
        copy_seconds=arena.seconds_per_block_copy,
    )
    return RoleContext(
        config=config,
        name=reporter.name,
        host_id=host_id,
        engine=engine,
        arena=arena.segment,
        block_pool=scheduler.block_pool,
        scheduler=scheduler,
        reporter=reporter,
        clock=monotonic_clock,
        pool_connector=pool_connector,
        block_memory=arena.block_memory,
        emit=inbox.put,
    )


def make_command_stages(
    context: RoleContext,
    pool_client: SharedPoolClient | None,
    constraints: "ConstraintFactory | None",
    inbox: ComputeInbox[NodeCommand | object],
) -> CommandStages:
    """What commands pass before they reach `inbox`: grammars, then look-ups in the pool."""
    lookups = constrained = None
    submit: Callable[[NodeCommand], None] = inbox.put
    if pool_client is not None:
        lookups = PoolLookups(pool_client, context.engine, context.pool_connector, inbox.put)
        submit = lookups.submit_command
    if constraints is not None:
        constraints.set_awaited_mask_callback(lambda: inbox.put(AwaitedMaskComputed()))
        constrained = ConstrainedOrders(constraints, submit, context.config.grammar_timeout)
        submit = constrained.submit_command
    return CommandStages(lookups, constrained, submit)


def choose_step_limits(config: NodeConfig, role: Role, device: DeviceType) -> StepLimits:
    """How much the node computes at once: see prefill_node and decode_node, default_limits.py.

    Raises ConfigError for limits that do not fit together, and for speculation that cannot be.
    """
    check_draft_settings(config)
    if device == "cuda" and config.speculative != "none":
        raise ConfigError(
            f"--speculative {config.speculative} is for CPUs, and this node computes on a GPU:"
            " choose --speculative none or --device cpu",
            param="speculative",
        )
    return resolve_step_limits(config, DEFAULT_LIMITS[role][device])


def check_cache_memory(
    config: NodeConfig, device: DeviceType, weights: PackedWeightStore | None
) -> None:
    """Raise ConfigError if the memory of the KV cache is not available."""
    try:
        require_cache_memory(config, device)
    except ConfigError:
        if weights is None:
            raise
        weights.cancel_opening()  # they may be of another model, and take the memory
        require_cache_memory(config, device)


def create_arena(
    config: NodeConfig, device: DeviceType, limits: StepLimits, engine: Engine
) -> HostArena:
    """Allocate the memory of the KV cache; the caller closes it.

    Raises ConfigError, and NodeFailed if the GPU failed while its memory was measured.
    """
    if device == "cpu":
        return create_host_arena(config, engine, limits)
    from node_engine.model.gpu.decode_graphs import list_buckets  # imports triton
    from node_engine.model.gpu.layer_graphs import list_token_buckets
    from node_engine.model.gpu.memory_profile import profile_device_memory

    num_graphs = len(list_buckets(limits.max_num_seqs))
    num_graphs += len(list_token_buckets(limits.max_batched_tokens))
    with node_failed_at_device_loss():
        memory = profile_device_memory(engine, limits, num_graphs)
    return create_host_arena(config, engine, limits, memory)


def warm_up_engine(
    engine: Engine, arena: HostArena, max_batched_tokens: int, stop: asyncio.Event
) -> None:
    """Bind the cache and warm up; on a GPU this takes seconds. Raises NodeFailed if it failed."""
    with node_failed_at_device_loss():
        engine.bind_cache(arena.engine_memory, arena.num_blocks)
        started = monotonic_clock()
        engine.warm_up(max_batched_tokens, lambda: not stop.is_set())
    if not stop.is_set():
        log.get_logger("process").info(
            "engine warm-up finished", seconds=round(monotonic_clock() - started, 3)
        )


def load_model_files(config: NodeConfig) -> ModelFileDigests:
    """Digests of the files that the engine was built from. Reads from disk."""
    if config.engine == "paced":
        return ModelFileDigests()
    return compute_file_digests(Path(config.model), dummy=config.load_format == "dummy")


def connect_pool_client(
    config: NodeConfig, name: NodeName, host_id: str, engine: Engine, arena: HostArena
) -> SharedPoolClient | None:
    """The client of the host's shared pool; None if the configuration names no pool."""
    if arena.pool_space is None:
        return None
    return make_pool_client(arena.pool_space.build_client_context(config, name, host_id, engine))


def make_role_factories(device: TransferDevice | None) -> Mapping[Role, RoleFactory]:
    """What makes the roles of a node with this device."""
    return {
        Role.PREFILL: partial(make_prefill_role, device=device),
        Role.DECODE: partial(make_decode_role, device=device),
    }


ROLE_FACTORIES = make_role_factories(None)


def _check_settings(config: NodeConfig) -> None:
    """Raise ConfigError for settings that would be found wrong only after a model is loaded."""
    resolve_weight_cache(config)
    if not config.coordinator:
        raise ConfigError("coordinator is not set: give --coordinator HOST:PORT")
    parse_endpoint(config.coordinator, "--coordinator", "coordinator")
    require_key_unless_loopback(
        "--listen",
        get_endpoint_host(config.listen),
        "cluster_token",
        config.cluster_token,
        insecure=config.insecure,
    )
