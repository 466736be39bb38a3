"""Makes the scheduler of a node, over its blocks and its engine."""

from collections.abc import Sequence

from baton.config.node_config import NodeConfig
from baton.process.clock import monotonic_clock
from baton.types import BlockIndex
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.kv_cache_manager import CopyBlocks
from node_engine.core.scheduling.preemption import PREEMPTION_POLICIES
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.scheduling.step_measurement import MeasuredStep
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.step.engine import Engine
from node_engine.host.host_arena import HostArena


def make_scheduler(
    config: NodeConfig,
    limits: StepLimits,
    measured: Sequence[MeasuredStep],
    engine: Engine,
    arena: HostArena,
    drafter: ModelDrafter | None,
) -> Scheduler:
    """`measured`: steps from which the scheduler learns what steps take here.

    `drafter` is the draft model of --speculative draft; without it, that drafts nothing.
    """
    has_drafts = drafter is not None or config.speculative != "draft"
    scheduler = Scheduler(
        BlockPool(
            arena.num_blocks,
            engine.layout.block_size,
            monotonic_clock,
            arena.memory.back_blocks,
        ),
        SchedulerLimits(
            limits.max_num_seqs,
            limits.max_batched_tokens,
            engine.max_model_len,
            engine.cache_limits.lookahead_tokens,
            limits.max_draft_tokens if has_drafts else 0,
        ),
        engine.eos_token_ids,
        PREEMPTION_POLICIES[config.preemption](),
        copy_pool_blocks=make_pool_block_copier(engine, arena),
    )
    if drafter is not None:
        scheduler.speculator.use_draft_model(drafter)
    scheduler.prefill_budget.max_step_seconds = limits.max_step_seconds
    # Drafts use what reading the weights leaves idle, too.
    scheduler.prefill_budget.spreads_prompts = (
        bool(measured) and not scheduler.speculator.is_enabled
    )
    for step in measured:
        scheduler.prefill_budget.observe_step(*step)
    return scheduler


def make_pool_block_copier(engine: Engine, arena: HostArena) -> CopyBlocks | None:
    """What copies blocks of the shared pool into own ones; None if they are read in place."""
    copy_blocks = arena.pool_block_copier
    if copy_blocks is None:
        return None

    def copy_and_load(copies: Sequence[tuple[BlockIndex, BlockIndex]]) -> None:
        copy_blocks(copies)
        engine.load_blocks([target for _, target in copies])

    return copy_and_load
