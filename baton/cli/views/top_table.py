"""Render `baton top`: one status, and the rates between two of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from baton.cli.views.counters import sum_counter
from baton.cli.views.device_table import build_device_table
from baton.cli.views.pool_text import PoolRates, compute_pool_rates, format_pools
from baton.cli.views.ratio_text import format_ratio_progress
from baton.pb.cluster_pb2 import NodeStatus, StatusResponse

_BAR_CELLS = 16  # width of the bar of a node's cache
_SERVICE_WORDS = {
    "in": "in service",
    "draining": "[yellow]draining[/]",
    "drained": "[red]drained[/]",
    "switching": "[yellow]switching[/]",
}


@dataclass(frozen=True, slots=True)
class ClusterRates:
    """Rates per second between two statuses; all 0 when there is only one."""

    tokens: float = 0.0
    requests: float = 0.0
    failed: float = 0.0  # requests
    replaced: float = 0.0  # attempts
    handoffs: float = 0.0
    handoff_bytes: float = 0.0
    pool: PoolRates = field(default_factory=PoolRates)


def compute_rates(before: StatusResponse | None, now: StatusResponse) -> ClusterRates:
    """Return the rates between two statuses.

    They are 0 if the coordinator restarted in between, because its counters began at 0 again.
    """
    seconds = now.clock_seconds - before.clock_seconds if before is not None else 0.0
    if before is None or seconds <= 0:
        return ClusterRates()

    def rate(name: str, **labels: str) -> float:
        return (
            max(
                0.0,
                sum_counter(now.counters, name, **labels)
                - sum_counter(before.counters, name, **labels),
            )
            / seconds
        )

    ended_rate = rate("baton_requests_total")
    success_rate = sum(
        rate("baton_requests_total", outcome=outcome) for outcome in ("stop", "length")
    )
    return ClusterRates(
        tokens=rate("baton_generated_tokens_total"),
        requests=ended_rate,
        failed=max(0.0, ended_rate - success_rate),
        replaced=rate("baton_replaced_total"),
        handoffs=rate("baton_handoffs_total", outcome="committed"),
        handoff_bytes=rate("baton_handoff_bytes_total"),
        pool=compute_pool_rates(before, now, seconds),
    )


def render_top(status: StatusResponse, rates: ClusterRates) -> RenderableType:
    lines = [
        _readiness_line(status),
        escape(format_ratio_progress(status.ratio)),
        _traffic_line(status, rates),
        _latency_line(status),
    ]
    pool = format_pools(status, rates.pool)
    nodes = sorted(status.nodes, key=lambda node: (node.role != "prefill", node.name))
    devices = build_device_table(nodes)
    return Group(
        *lines,
        *([pool] if pool else []),
        _node_table(nodes),
        *([devices] if devices else []),
    )


def _readiness_line(status: StatusResponse) -> str:
    ready = "[green]ready[/]" if status.ready else f"[red]not ready[/]: {escape(status.reason)}"
    return (
        f"{ready}  {escape(status.model)}  {status.mode}  "
        f"[bold]{status.running}[/] running  [bold]{status.queued}[/] queued"
    )


def _traffic_line(status: StatusResponse, rates: ClusterRates) -> str:
    committed = sum_counter(status.counters, "baton_handoffs_total", outcome="committed")
    return (
        f"{rates.tokens:.1f} tokens/s  {rates.requests:.2f} requests/s  "
        f"{rates.failed:.2f} failed/s  {rates.replaced:.2f} placed again/s  "
        f"hand-offs {rates.handoffs:.2f}/s, "
        f"{rates.handoff_bytes / 1e6:.2f} MB/s, {committed:.0f} in all"
    )


def _latency_line(status: StatusResponse) -> str:
    latency = status.latency
    if not latency.requests:
        return f"no request has ended in the last {latency.window_seconds:.0f} s"
    return (
        f"last {latency.window_seconds:.0f} s: {latency.requests} requests  "
        f"TTFT p50 {latency.ttft_p50 * 1e3:.1f} p90 {latency.ttft_p90 * 1e3:.1f} ms  "
        f"TPOT p50 {latency.tpot_p50 * 1e3:.2f} p90 {latency.tpot_p90 * 1e3:.2f} ms"
    )


def _node_table(nodes: Iterable[NodeStatus]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("node", "role", "service"):
        table.add_column(heading, no_wrap=True)
    for heading in ("requests", "running", "waiting", "to compute"):
        table.add_column(heading, justify="right")
    table.add_column("cache: used, held, cached", no_wrap=True)
    table.add_column("heard", justify="right")
    for node in nodes:
        stats = node.stats
        numbers = (node.placed, stats.running, stats.waiting, stats.queued_tokens)
        table.add_row(
            escape(node.name),
            node.role,
            _SERVICE_WORDS.get(node.service, node.service),
            *map(str, numbers),
            _cache_bar(node),
            f"{node.heard_seconds_ago:.1f} s",
        )
    return table


def _cache_bar(node: NodeStatus) -> str:
    stats = node.stats
    if not stats.blocks_total:
        return "not heard yet"
    held_blocks = stats.blocks_reserved + stats.blocks_writing + stats.blocks_quarantined
    used = _to_cells(stats.blocks_in_use, stats.blocks_total)
    waiting = _to_cells(held_blocks, stats.blocks_total)
    cached = _to_cells(stats.blocks_cached, stats.blocks_total)
    rest = max(0, _BAR_CELLS - used - waiting - cached)
    bar = f"[cyan]{'█' * used}[/][yellow]{'█' * waiting}[/][blue]{'▒' * cached}[/]{'·' * rest}"
    return (
        f"{bar} {stats.blocks_in_use}+{held_blocks}+{stats.blocks_cached} of {stats.blocks_total}"
    )


def _to_cells(blocks: int, total: int) -> int:
    """Return the cells for `blocks` of `total`, rounded up so that any block is visible."""
    return -(-blocks * _BAR_CELLS // total)
