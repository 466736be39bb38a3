"""How an explanation looks on a terminal: a waterfall of stages, tokens by source, attempts."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.cli.views.timeline import format_handoff, stage_seconds
from baton.pb.cluster_pb2 import AttemptReport, Candidate, ExplainResponse, Prediction
from baton.pb.common_pb2 import FinishReason

_BAR_WIDTH = 48  # characters
_EXCLUSION_REASONS = {
    "failed before": "its last attempt failed there",
    "newcomer": "it has just joined and is given more and more",
    "kept apart": "hand-offs between the two failed, and they are kept apart",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def render_explanation(told: ExplainResponse) -> RenderableType:
    parts: list[RenderableType] = [
        Text(_headline(told)),
        _stage_table(told),
        Text(_token_sources(told)),
    ]
    if told.timeline.handoff.slabs:
        parts.append(Text(format_handoff(told.timeline.handoff)))
    parts.append(_attempt_table(told))
    if told.attempts_left_out:
        parts.append(Text(f"{told.attempts_left_out} attempts in the middle are not kept"))
    if told.attempts:
        parts.append(_candidate_table(told.attempts[-1]))
        if told.attempts[-1].way:
            parts.append(Text(_describe_prefill_site(told.attempts[-1])))
        if told.attempts[-1].HasField("predicted"):
            parts.append(_prediction_table(told))
    if told.others:
        parts.append(_choice_table([told, *told.others]))
    return Group(*parts)


def _headline(told: ExplainResponse) -> str:
    kind = "warm-up request" if told.warm_up else "request"
    which = f", the first of {1 + len(told.others)} choices" if told.others else ""
    return f"{kind} {told.request_id}{which}: {_request_outcome(told)}"


def _request_outcome(told: ExplainResponse) -> str:
    how = told.state or "not kept any more"
    if told.state == "finished":
        how += f" ({FinishReason.Name(told.finish_reason).removeprefix('FINISH_REASON_').lower()})"
    if told.HasField("error"):
        how += f": {told.error.code}: {told.error.message}"
    return how


def _stage_table(told: ExplainResponse) -> Table:
    """Each stage begins where the one before ended; together they are the time to the first
    token."""
    line = told.timeline
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (("stage", "left"), ("ms", "right"), ("share", "right"), ("", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=True)
    begun = 0.0
    for name, seconds in stage_seconds(line).items():
        share = seconds / line.ttft if line.ttft else 0.0
        table.add_row(
            name.replace("_", " "),
            _format_ms(seconds),
            f"{share:.0%}",
            _waterfall_bar(begun, share),
        )
        begun += share
    reached = "[bold]time to first token[/]" if told.output_tokens else "no token yet"
    table.add_row(reached, f"[bold]{_format_ms(line.ttft)}[/]", "", "the sum")
    each = told.decode / (told.output_tokens - 1) if told.output_tokens > 1 else None
    pace = (
        f"{told.output_tokens - 1} more tokens, {_format_ms(each)} each" if each is not None else ""
    )
    table.add_row("decode", _format_ms(told.decode), "", pace)
    table.add_row("whole request", _format_ms(line.total), "", "")
    return table


def _waterfall_bar(begun: float, share: float) -> str:
    """`share` of the width, after `begun` of it: a stage that took any time at all shows."""
    start, width = round(begun * _BAR_WIDTH), share * _BAR_WIDTH
    whole, part = int(width), int((width - int(width)) * 8)
    if share > 0 and not whole and not part:
        part = 1
    return " " * min(start, _BAR_WIDTH - 1) + "█" * whole + _EIGHTHS[part].strip()


def _token_sources(told: ExplainResponse) -> str:
    sources = told.sources
    known = ", ".join(
        f"{count} {words}"
        for count, words in (
            (sources.computed_prefill, "computed on prefill"),
            (sources.computed_decode, "computed on decode"),
            (sources.local_cache, "from a node's cache"),
            (sources.pool, "from the pool"),
            (sources.remote_pool, "from another host's pool"),
        )
        if count
    )
    by_handoff = f"; {sources.received} of them by hand-off" if sources.received else ""
    origin = f" ({known}{by_handoff})" if known else ""
    return f"prompt: {told.prompt_tokens} tokens{origin}\noutput: {told.output_tokens} of at most {told.max_tokens} tokens"


def _attempt_table(told: ExplainResponse) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("attempt", "placed", "over", "prefill", "decode", "context", "how it ended"):
        table.add_column(
            heading, justify="right" if heading in ("placed", "over", "context") else "left"
        )
    for attempt in told.attempts:
        table.add_row(
            str(attempt.number),
            _format_ms(attempt.placed),
            _format_ms(attempt.over) if attempt.HasField("over") else "-",
            escape(_prefill_cell(attempt)),
            escape(attempt.decode_node or "-"),
            str(attempt.context_tokens),
            escape(_attempt_end(attempt)),
        )
    return table


def _prefill_cell(attempt: AttemptReport) -> str:
    """The prefill node that was chosen, if one was, and whether it had a part in the answer."""
    if not attempt.prefill_node:
        return "-"
    return f"{attempt.prefill_node}, not needed" if attempt.way == "local" else attempt.prefill_node


def _attempt_end(attempt: AttemptReport) -> str:
    return _attempt_outcome(attempt) + _attempt_remarks(attempt)


def _attempt_remarks(attempt: AttemptReport) -> str:
    held = (
        f"; the retry budget had held it back for {_format_ms(attempt.held_back)} ms"
        if attempt.held_back
        else ""
    )
    return held + ("; a probe of two nodes that had been kept apart" if attempt.probe else "")


def _attempt_outcome(attempt: AttemptReport) -> str:
    if not attempt.ended:
        return "runs"
    if attempt.ended == "refused":
        return f"refused: needed {attempt.needed} blocks, {attempt.free} were free"
    return f"{attempt.ended}: {attempt.reason}" if attempt.reason else attempt.ended


def _candidate_table(attempt: AttemptReport) -> Table:
    """Of the last attempt. `predicted` is what the policy ranks by: seconds until a prefill node
    would have the prompt computed and handed over, and what the whole answer would take on a decode
    node."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = ("requests", "tokens to compute", "room", "tokens held", "predicted ms")
    for heading in (f"considered for attempt {attempt.number}", "role", *numbers, ""):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for one in attempt.considered:
        to_compute = str(one.uncomputed_tokens) if one.role == "prefill" else "-"
        predicted = _format_ms(one.predicted_seconds) if one.HasField("predicted_seconds") else "-"
        counts = (str(one.attempts), to_compute, str(one.room), str(one.held_tokens), predicted)
        table.add_row(escape(one.node), one.role, *counts, _candidate_verdict(one))
    return table


def _prediction_table(told: ExplainResponse) -> Table:
    """What was expected of the last attempt, beside what came of it. Expected output is of the
    whole attempt."""
    attempt, line = told.attempts[-1], told.timeline
    expected = attempt.predicted
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (f"expected of attempt {attempt.number}", "predicted", "real"):
        table.add_column(heading, justify="left" if heading.startswith("expected") else "right")
    computed = attempt.prefill_ended - attempt.placed if attempt.HasField("prefill_ended") else None
    first = (
        line.ttft - attempt.placed if told.output_tokens and line.ttft >= attempt.placed else None
    )
    step = told.decode / (told.output_tokens - 1) if told.output_tokens > 1 else None
    prompt = expected.queue + expected.prefill
    table.add_row(
        "prompt computed, ms", _format_ms(prompt), "-" if computed is None else _format_ms(computed)
    )
    table.add_row(
        "first token, ms",
        _format_ms(prompt + expected.transfer),
        "-" if first is None else _format_ms(first),
    )
    table.add_row(
        "each step, ms", _format_ms(expected.step), "-" if step is None else _format_ms(step)
    )
    table.add_row("output, tokens", f"{expected.output_tokens:.0f}", str(told.output_tokens))
    return table


_PREFILL_SITES = {
    "hand_off": "a prefill node, which hands it over",
    "local": "the decode node itself",
}
_PLACEMENT_REASONS = {
    "mode": "the mode leaves no choice",
    "no_prefill_node": "no prefill node serves",
    "held": "its cache has the context",
    "sooner": "predicted to be sooner",
    "failed": "the last attempt failed where the other way would go",
    "degraded": "hand-offs are given up for the time being",
}


def _describe_prefill_site(attempt: AttemptReport) -> str:
    """Who computed the prompt, and what was predicted of whom."""
    told = f"prompt computed by: {_PREFILL_SITES.get(attempt.way, attempt.way)} ({_PLACEMENT_REASONS.get(attempt.why, attempt.why)}"
    if attempt.HasField("other_way"):
        taken, other = _predicted_ttft(attempt.predicted), _predicted_ttft(attempt.other_way)
        told += f": first token predicted after {_format_ms(taken)} ms, the other way after {_format_ms(other)} ms"
    return told + ")"


def _predicted_ttft(one: Prediction) -> float:
    return one.queue + one.prefill + one.transfer


def _candidate_verdict(one: Candidate) -> str:
    if one.chosen:
        return "[green]chosen[/]"
    verdict = "could have" if one.able else "had no room"
    return (
        f"{verdict}: {_EXCLUSION_REASONS.get(one.because, one.because)}" if one.because else verdict
    )


def _choice_table(told: Sequence[ExplainResponse]) -> Table:
    """All of an answer, a line each; the id of one explains it by itself."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "choice",
        "request",
        "first token",
        "whole",
        "tokens",
        "prefill",
        "decode",
        "how it ended",
    ):
        table.add_column(
            heading, justify="right" if heading in ("first token", "whole", "tokens") else "left"
        )
    for index, one in enumerate(told):
        line = one.timeline
        table.add_row(
            str(index),
            one.request_id,
            _format_ms(line.ttft) if one.output_tokens else "-",
            _format_ms(line.total) if one.state else "-",
            str(one.output_tokens) if one.state else "-",
            escape(line.prefill_node or "-"),
            escape(line.decode_node or "-"),
            escape(_request_outcome(one)),
        )
    return table


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
