"""The table of `baton status` and `baton top` about the devices that nodes compute on."""

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from baton.pb.cluster_pb2 import DeviceReport, NodeStatus
from baton.shared_memory.available_memory import format_size

_UNKNOWN = "-"


def build_device_table(nodes: Iterable[NodeStatus]) -> Table | None:
    """One row for each node that has reported its device; None if none has."""
    rows = [_device_row(node) for node in nodes if node.stats.HasField("device")]
    if not rows:
        return None
    table = Table(box=None, header_style="bold")
    for heading in ("node", "device", "name"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory used", "MFU", "MBU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _device_row(node: NodeStatus) -> tuple[str, ...]:
    device = node.stats.device
    threads = f", {device.threads} threads" if device.threads else ""
    return (
        node.name,
        device.device,
        f"{device.name}{threads}",
        _format_memory(device),
        _format_share(device.mfu) if device.HasField("mfu") else _UNKNOWN,
        _format_share(device.mbu) if device.HasField("mbu") else _UNKNOWN,
    )


def _format_memory(device: DeviceReport) -> str:
    if not device.memory_total_bytes:
        return _UNKNOWN
    used, total = map(format_size, (device.memory_used_bytes, device.memory_total_bytes))
    return f"{used} of {total}"


def _format_share(share: float) -> str:
    return f"{100 * share:.1f}%"
