"""A decode node in this process, without a coordinator and without a transfer plane."""

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from baton.cluster_link.messages import LedgerReport, NodeReport, StepTokens
from baton.config.node_config import NodeConfig
from baton.types import Incarnation, NodeName, SamplingParams
from benchmarks.steps.no_plane import NoInboundPlane
from benchmarks.steps.step_orders import make_order
from decode_node.decode_role import DecodeRole
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.node_commands import NodeJoined
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.step.engine import Engine
from node_engine.host.compute_thread import ComputeInbox, ComputeThread
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from node_engine.roles.role_policy import ConstraintSource, NoConstraints, RoleContext
from node_engine.shared_pool.pool_connector import PoolConnector

_INCARNATION = Incarnation("bench")
_MAX_SEQUENCES = 64
_MAX_BATCHED_TOKENS = 1024
_NUM_BLOCKS = 2048


class StepNode:
    """Runs batches of requests on the compute thread of a node that has no other load."""

    def __init__(
        self,
        engine: Engine,
        on_report: Callable[[NodeReport | LedgerReport], None],
        constraints: ConstraintSource | None = None,
    ) -> None:
        """`on_report` is called on the compute thread with each report; `constraints` makes the
        grammars of outputs."""
        layout = engine.layout
        engine.bind_cache(memoryview(mmap.mmap(-1, _NUM_BLOCKS * layout.block_bytes)), _NUM_BLOCKS)
        self._on_report = on_report
        self._digest = engine.model_identity.digest
        self._num_requests = 0
        self._unfinished = 0
        self._finished = threading.Event()
        pool = BlockPool(_NUM_BLOCKS, layout.block_size, time.monotonic)
        limits = SchedulerLimits(_MAX_SEQUENCES, _MAX_BATCHED_TOKENS, engine.max_model_len)
        self.scheduler = Scheduler(pool, limits, engine.eos_token_ids)
        self.inbox: ComputeInbox[object] = ComputeInbox()
        context = RoleContext(
            config=NodeConfig(),
            name=NodeName("bench"),
            host_id="bench",
            engine=engine,
            arena=cast(Any, None),  # only tickets name it
            block_pool=pool,
            scheduler=self.scheduler,
            reporter=CoordinatorReporter(NodeName("bench"), self._receive_report),
            clock=time.monotonic,
            pool_connector=PoolConnector(
                None, pool, self.scheduler, self.inbox.put, save_blocks=engine.save_blocks
            ),
            block_memory=memoryview(b""),
            emit=self.inbox.put,
            constraints=constraints or NoConstraints(),
        )
        self.role = DecodeRole(context, NoInboundPlane())
        self.compute_thread = ComputeThread(context, self.inbox, time.monotonic, self.inbox.put)

    def start(self) -> None:
        self.compute_thread.start(self.role)
        self.inbox.put(NodeJoined(_INCARNATION))

    def stop(self) -> None:
        self.compute_thread.stop()

    def run_requests(self, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> None:
        """Run one request per prompt at the same time; returns when all have ended."""
        self.run_batch(prompts, [sampling] * len(prompts))

    def run_batch(self, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> None:
        """As `run_requests`, with sampling parameters of its own for each prompt."""
        self._unfinished = len(prompts)
        self._finished.clear()
        for prompt, sampling in zip(prompts, params, strict=True):
            self._num_requests += 1
            self.inbox.put(make_order(self._num_requests, prompt, sampling, self._digest))
        self._finished.wait()

    def _receive_report(self, report: NodeReport | LedgerReport, sender: Incarnation) -> None:
        self._on_report(report)
        if isinstance(report, StepTokens):
            self._unfinished -= sum(event.finish_reason is not None for event in report.events)
            if not self._unfinished:
                self._finished.set()
