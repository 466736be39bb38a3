"""Puts the coordinator's request handling and a colocated node together in this process.

    load_engine    loads the model, allocates the KV cache and warms up; takes seconds
    start_server   starts a compute thread on it, with a coordinator on the caller's event loop

The node computes every prompt itself, so that there are no hand-offs. Requests pass through the
HTTP application of the coordinator, its queue and its scheduling, without sockets.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.config.common import MAX_SECONDS
from baton.config.coordinator_config import CoordinatorConfig
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests
from baton.models.generation_defaults import GenerationDefaults, load_generation_defaults
from baton.models.model_source import with_local_model
from baton.process.clock import monotonic_clock
from baton.shared_memory import segment as segments
from baton.structured_output.tokenizer_file import find_tokenizer_file
from baton.types import Incarnation, NodeName, Role, mint_id
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.http.app import build_app
from coordinator.frontend.output_parsing import OutputParserSettings
from coordinator.frontend.request import RejectionCounter
from coordinator.frontend.request_intake import RequestIntake
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.structured_output.grammar_checker import VERDICTS_PER_GRAMMAR, GrammarChecker
from coordinator.text.text_workers import TextWorkers
from coordinator.text.tokenizer_loader import load_tokenizer
from decode_node.decode_role import DecodeRole
from node_engine.core.node_commands import NodeCommand
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.scheduling.step_measurement import MeasuredStep
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.step.engine import Engine
from node_engine.host.assemble import (
    choose_step_limits,
    create_arena,
    make_command_stages,
    make_role_context,
    warm_up_engine,
)
from node_engine.host.compute_thread import (
    CacheMemoryExhausted,
    ComputeInbox,
    ComputeThread,
    SwitchableRole,
)
from node_engine.host.constraints import make_constraint_factory
from node_engine.host.device_monitor import DeviceMonitor
from node_engine.host.draft_model import build_drafter
from node_engine.host.engine_factory import build_engine, resolve_device_type
from node_engine.host.engine_measurement import measure_limits
from node_engine.host.host_arena import HostArena, require_cache_memory
from node_engine.host.node_link_member import NodeLinkMember
from node_engine.host.scheduler_factory import make_scheduler
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from offline.in_process.in_process_server import InProcessServer
from offline.in_process.no_transfers import NoTransfers
from offline.in_process.node_connection import InProcessNodeConnection

if TYPE_CHECKING:
    from node_engine.structured_output.constraint_factory import ConstraintFactory

_NAME = NodeName("in-process")
_UNBOUNDED = 1 << 40  # requests and tokens that may wait: the caller bounds what it submits


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """A warm engine over its KV cache."""

    config: NodeConfig  # with a local folder as its model
    engine: Engine
    arena: HostArena
    limits: StepLimits
    measured_steps: Sequence[MeasuredStep]
    drafter: ModelDrafter | None
    constraints: "ConstraintFactory | None"  # None: the model has no tokenizer

    def close(self) -> None:
        """Free the cache, and end the threads. Nothing may be computed any more."""
        if self.constraints is not None:
            self.constraints.close()
        self.arena.close()


def load_engine(config: NodeConfig) -> WarmEngine:
    """Load a model; the caller closes it. Raises ConfigError, or NodeFailed for a GPU."""
    if config.engine == "model" and not config.model:
        raise ConfigError("no model is given: name a folder, a hub id or a cluster's URL")
    config = with_local_model(config)
    segments.remove_stale_segments(Path(config.segment_dir))
    device = resolve_device_type(config)
    limits = choose_step_limits(config, Role.DECODE, device)
    require_cache_memory(config, device)
    with ExitStack() as undo:
        constraints = make_constraint_factory(config, undo)
        engine = build_engine(config, device, limits)
        arena = create_arena(config, device, limits, engine)
        undo.callback(arena.close)
        warm_up_engine(engine, arena, limits.max_batched_tokens, asyncio.Event())
        measured, limits = measure_limits(config, engine, arena, limits)
        drafter = build_drafter(config, Role.DECODE, limits, engine, arena)
        if constraints is not None:
            constraints.wait_for_tokenizer()
        undo.pop_all()
    return WarmEngine(config, engine, arena, limits, measured, drafter, constraints)


async def start_server(loaded: WarmEngine, requests: CoordinatorConfig) -> InProcessServer:
    """Start to serve on the running event loop, with the output parsers of `requests`.

    Raises ConfigError for a bad tokenizer.
    """
    config = _coordinator_config(loaded.config)
    dispatcher, workers = Dispatcher(config), TextWorkers()
    # Grammars are compiled in a process of their own first, as in a cluster: one that takes too
    # much memory or stack then ends that process, and not the caller's.
    grammar_checker = GrammarChecker(
        find_tokenizer_file(config.model, config.engine),
        timeout_seconds=loaded.config.grammar_timeout,
        max_entries=loaded.config.grammar_cache * VERDICTS_PER_GRAMMAR,
    )
    tokenizer = asyncio.get_running_loop().create_future()
    tokenizer.set_result(await load_tokenizer(config.model, config.engine, workers))
    intake = RequestIntake(
        dispatcher,
        tokenizer,
        model=config.public_model_name,
        max_timeout_seconds=config.request_timeout,
        rejections=RejectionCounter(lambda error, tenant_class: None),
        defaults=_generation_defaults(config),
        output_parsers=OutputParserSettings(requests.tool_call_parser, requests.reasoning_parser),
        workers=workers,
        check_grammar=grammar_checker.check_grammar,
    )
    server = InProcessServer(dispatcher, workers, grammar_checker, loaded.arena)
    server.app = build_app(intake, server, ClientAuthenticator())
    _join_node(loaded, dispatcher, server)
    return server


def _join_node(loaded: WarmEngine, dispatcher: Dispatcher, server: InProcessServer) -> None:
    """Start the compute thread, and make its node the one member of the dispatcher's cluster."""
    config, engine, arena = loaded.config, loaded.engine, loaded.arena
    inbox: ComputeInbox[NodeCommand | object] = ComputeInbox()
    link = InProcessNodeConnection(
        dispatcher, asyncio.get_running_loop(), server.on_scheduling_failed
    )
    reporter = CoordinatorReporter(_NAME, link.send_report)
    scheduler = make_scheduler(
        config, loaded.limits, loaded.measured_steps, engine, arena, loaded.drafter
    )
    host_id = segments.compute_host_id(Path(config.segment_dir))
    context = make_role_context(config, host_id, engine, arena, scheduler, None, reporter, inbox)
    stages = make_command_stages(context, None, loaded.constraints, inbox)
    if stages.constrained_orders is not None:
        context = replace(context, constraints=stages.constrained_orders)
    role = SwitchableRole(
        context,
        {Role.DECODE: lambda parts: DecodeRole(parts, NoTransfers())},
        Role.DECODE,
        on_changed=lambda: None,
    )
    compute_thread = ComputeThread(
        context, inbox, monotonic_clock, stages.submit_command, server.on_node_failed
    )
    server.stages, server.compute_thread = stages, compute_thread
    devices = DeviceMonitor(engine, monotonic_clock)
    files = ModelFileDigests()
    member = NodeLinkMember(context, role, compute_thread, stages, None, files, devices)
    incarnation = Incarnation(mint_id(64))
    compute_thread.start(role)
    member.on_joined(incarnation)
    info = replace(member.build_join(), process=mint_id(64))
    effects = dispatcher.brain.join_node(info, incarnation, dispatcher.clock())
    link.connect(compute_thread)
    dispatcher.add_member(incarnation, link, effects)
    server.heartbeats = asyncio.create_task(link.send_heartbeats(member.build_stats, incarnation))
    arena.memory.start_allocation(lambda: inbox.put(CacheMemoryExhausted()))


def _coordinator_config(config: NodeConfig) -> CoordinatorConfig:
    """Settings without deadlines: the node neither goes away nor stays silent."""
    return CoordinatorConfig(
        model=config.model,
        served_model_name=config.served_model_name,
        engine=config.engine,
        prefill=0,
        mode="colocated",
        placement="least_loaded",
        request_timeout=MAX_SECONDS,
        silence=MAX_SECONDS,
        stall=MAX_SECONDS,
        degrade_wait=MAX_SECONDS,
        max_queue=_UNBOUNDED,
        max_queue_tokens=_UNBOUNDED,
        explain_keep=0,
    )


def _generation_defaults(config: CoordinatorConfig) -> GenerationDefaults:
    if config.engine != "model":
        return GenerationDefaults()
    return load_generation_defaults(Path(config.model))
