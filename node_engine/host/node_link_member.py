"""A node as a member of the cluster: how it describes itself, and what a new incarnation means.

Runs on the event loop. Statistics are snapshots that the compute thread has left.
"""

import os

from baton.cluster_link.messages import PROTOCOL_VERSION, JoinInfo
from baton.cluster_link.report_types import NodeStats
from baton.models.file_digests import ModelFileDigests
from baton.process import log
from baton.types import Incarnation
from node_engine.core.node_commands import CoordinatorLost, NodeJoined
from node_engine.core.sequences.sequence import SequenceState
from node_engine.host.command_stages import CommandStages
from node_engine.host.compute_thread import ComputeThread, SwitchableRole
from node_engine.host.device_monitor import DeviceMonitor
from node_engine.roles.role_policy import RoleContext
from node_engine.shared_pool.pool_client import SharedPoolClient


class NodeLinkMember:
    """What CoordinatorLink calls; see LinkMember."""

    def __init__(
        self,
        context: RoleContext,
        role: SwitchableRole,
        compute_thread: ComputeThread,
        stages: CommandStages,
        pool_client: SharedPoolClient | None,
        model_files: ModelFileDigests,
        device_monitor: DeviceMonitor,
    ) -> None:
        self._context = context
        self._role = role
        self._compute_thread = compute_thread
        self._stages = stages
        self._pool_client = pool_client
        self._model_files = model_files
        self._device_monitor = device_monitor

    def on_joined(self, incarnation: Incarnation) -> None:
        self._compute_thread.submit_command(NodeJoined(incarnation))

    def on_coordinator_lost(self) -> None:
        self._compute_thread.submit_command(CoordinatorLost())

    def build_join(self) -> JoinInfo:
        config, engine = self._context.config, self._context.engine
        identity, limits = engine.model_identity, self._context.scheduler.limits
        return JoinInfo(
            protocol_version=PROTOCOL_VERSION,
            name=self._context.name,
            role=self._role.role,
            host_id=self._context.host_id,
            transfer_endpoint=self._role.transfer_endpoint,
            pid=os.getpid(),
            model_digest=engine.model_digest.hex(),
            layout=engine.layout,
            num_blocks=self._context.block_pool.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            engine=config.engine,
            implementation=identity.implementation,
            dtype=identity.dtype,
            quantization=identity.quantization,
            files=self._model_files,
            rejoining=self._context.reporter.incarnation,
        )

    def build_stats(self) -> NodeStats:
        """Statistics for the heartbeat, read without a lock: at most one step old."""
        load, steps = self._compute_thread.scheduler_load, self._compute_thread.decode_step_totals
        live = load.num_sequences_by_state
        counts = {
            f"blocks_{state.value}": count
            for state, count in self._context.block_pool.ownership.count_blocks_by_state().items()
        }
        return NodeStats(
            blocks_total=self._context.block_pool.num_blocks,
            waiting=live[SequenceState.WAITING] + live[SequenceState.PREFILLING],
            running=live[SequenceState.RUNNING],
            queued_tokens=load.queued_tokens,
            progress_age_seconds=self._compute_thread.progress_age_seconds,
            counters=self._role.counters()
            | self._compute_thread.device_seconds
            | self._context.scheduler.speculator.counters()
            | self._pool_counters()
            | self._stages.counters()
            | log.get_log_counters(),
            decode_steps=steps.num_steps,
            decode_step_seconds=steps.seconds,
            decode_step_sequences=steps.num_sequences,
            decode_step_tokens=steps.context_tokens,
            device=self._device_monitor.build_report(self._compute_thread.work_meter.totals),
            **counts,
        )

    def _pool_counters(self) -> dict[str, float]:
        return self._context.pool_connector.counters() | (
            self._pool_client.counters() if self._pool_client else {}
        )
