"""Render a request's timeline on a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.pb.common_pb2 import HandoffReport, Timeline

STAGES = ("queue", "reserve", "prefill", "transfer", "first_token")
_BAR_WIDTH = 40  # characters


def stage_seconds(timeline: Timeline) -> dict[str, float]:
    """Return seconds by stage; their sum is the time to the first token."""
    return {name: float(getattr(timeline, name)) for name in STAGES}


def early_arrival_share(report: HandoffReport) -> float:
    """Return the share of slabs that landed before the last layer was computed, 0 to 1."""
    return report.slabs_landed_before_last_layer / report.slabs if report.slabs else 0.0


def render_timeline(timeline: Timeline) -> RenderableType:
    """Return the stage table, followed by the request's nodes and its hand-off."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (("stage", "left"), ("ms", "right"), ("", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for name, seconds in stage_seconds(timeline).items():
        width = round(_BAR_WIDTH * seconds / timeline.ttft) if timeline.ttft else 0
        table.add_row(name.replace("_", " "), f"{seconds * 1e3:.1f}", "█" * width)
    table.add_row("[bold]time to first token[/]", f"[bold]{timeline.ttft * 1e3:.1f}[/]", "the sum")
    if timeline.grammar:
        table.add_row("grammar", f"{timeline.grammar * 1e3:.1f}", "compiled before the queue")
    table.add_row("whole request", f"{timeline.total * 1e3:.1f}", "")
    return Group(
        table,
        Text(_placement_line(timeline)),
        *([Text(format_handoff(timeline.handoff))] if timeline.handoff.slabs else []),
    )


def _placement_line(timeline: Timeline) -> str:
    prefill_node = timeline.prefill_node or "no prefill node"
    attempts = "" if timeline.attempts <= 1 else f", {timeline.attempts} attempts"
    return f"prefill: {prefill_node}   decode: {timeline.decode_node or 'none'}{attempts}"


def _format_group(layers: int) -> str:
    return "" if not layers else f", {layers} layer{'s' if layers > 1 else ''} at once"


def format_handoff(report: HandoffReport) -> str:
    return (
        f"hand-off: {report.bytes / 1e6:.2f} MB over {report.transport} in {report.slabs} slabs"
        f"{_format_group(report.group_layers)}\n"
        f"          {early_arrival_share(report):.0%} landed before the last layer was computed\n"
        f"          computed {report.computed_tokens} tokens "
        f"in {report.compute_seconds * 1e3:.1f} ms, "
        f"slowed by {report.slowed_seconds * 1e3:.1f} ms, "
        f"exposed {report.exposed_seconds * 1e3:.1f} ms, "
        f"commit {report.commit_seconds * 1e3:.1f} ms"
    )
