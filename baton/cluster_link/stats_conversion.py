"""Converts what heartbeats report of a node or pool, its load and its device, to protobuf and back.

No other code reads fields of these messages.
"""

import math

from baton.cluster_link.pb_conversion import check_seconds
from baton.cluster_link.report_types import DeviceReport, NodeStats
from baton.pb import cluster_pb2


def stats_to_pb(stats: NodeStats) -> cluster_pb2.NodeStats:
    return cluster_pb2.NodeStats(
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        blocks_cached=stats.blocks_cached,
        blocks_reserved=stats.blocks_reserved,
        blocks_writing=stats.blocks_writing,
        blocks_in_use=stats.blocks_in_use,
        blocks_quarantined=stats.blocks_quarantined,
        waiting=stats.waiting,
        running=stats.running,
        queued_tokens=stats.queued_tokens,
        progress_age_seconds=stats.progress_age_seconds,
        counters=stats.counters,
        decode_steps=stats.decode_steps,
        decode_step_seconds=stats.decode_step_seconds,
        decode_step_sequences=stats.decode_step_sequences,
        decode_step_tokens=stats.decode_step_tokens,
        device=_device_to_pb(stats.device) if stats.device else None,
    )


def stats_from_pb(message: cluster_pb2.NodeStats) -> NodeStats:
    return NodeStats(
        blocks_total=message.blocks_total,
        blocks_free=message.blocks_free,
        blocks_cached=message.blocks_cached,
        blocks_reserved=message.blocks_reserved,
        blocks_writing=message.blocks_writing,
        blocks_in_use=message.blocks_in_use,
        blocks_quarantined=message.blocks_quarantined,
        waiting=message.waiting,
        running=message.running,
        queued_tokens=message.queued_tokens,
        progress_age_seconds=check_seconds(message.progress_age_seconds),
        counters=dict(message.counters),
        decode_steps=message.decode_steps,
        decode_step_seconds=check_seconds(message.decode_step_seconds),
        decode_step_sequences=message.decode_step_sequences,
        decode_step_tokens=message.decode_step_tokens,
        device=_device_from_pb(message.device) if message.HasField("device") else None,
    )


def _device_to_pb(report: DeviceReport) -> cluster_pb2.DeviceReport:
    return cluster_pb2.DeviceReport(
        device=report.device,
        name=report.name,
        threads=report.threads,
        memory_total_bytes=report.memory_total_bytes,
        memory_used_bytes=report.memory_used_bytes,
        mfu=report.mfu,
        mbu=report.mbu,
        packed_weight_bytes=report.packed_weight_bytes,
        packed_weight_source=report.packed_weight_source,
    )


def _device_from_pb(message: cluster_pb2.DeviceReport) -> DeviceReport:
    return DeviceReport(
        device=message.device,
        name=message.name,
        threads=message.threads,
        memory_total_bytes=message.memory_total_bytes,
        memory_used_bytes=message.memory_used_bytes,
        mfu=_check_share(message.mfu) if message.HasField("mfu") else None,
        mbu=_check_share(message.mbu) if message.HasField("mbu") else None,
        packed_weight_bytes=message.packed_weight_bytes,
        packed_weight_source=message.packed_weight_source,
    )


def _check_share(share: float) -> float:
    """Raise ValueError unless it is finite and not negative."""
    if not 0.0 <= share < math.inf:
        raise ValueError(f"a share is {share:g}: it must be finite and at least 0")
    return share
