"""Render the explanation of a request: a waterfall of stages, token sources and attempts."""

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


def render_explanation(explanation: ExplainResponse) -> RenderableType:
    parts: list[RenderableType] = [
        Text(_headline(explanation)),
        _stage_table(explanation),
        Text(_token_sources(explanation)),
    ]
    if explanation.timeline.handoff.slabs:
        parts.append(Text(format_handoff(explanation.timeline.handoff)))
    parts.append(_attempt_table(explanation))
    if explanation.attempts_left_out:
        parts.append(Text(f"{explanation.attempts_left_out} attempts in the middle are not kept"))
    if explanation.attempts:
        parts.append(_candidate_table(explanation.attempts[-1]))
        if explanation.attempts[-1].way:
            parts.append(Text(_describe_prefill_site(explanation.attempts[-1])))
        if explanation.attempts[-1].HasField("predicted"):
            parts.append(_prediction_table(explanation))
    if explanation.others:
        parts.append(_choice_table([explanation, *explanation.others]))
    return Group(*parts)


def _headline(explanation: ExplainResponse) -> str:
    kind = "warm-up request" if explanation.warm_up else "request"
    which = f", the first of {1 + len(explanation.others)} choices" if explanation.others else ""
    return f"{kind} {explanation.request_id}{which}: {_request_outcome(explanation)}"


def _request_outcome(explanation: ExplainResponse) -> str:
    how = explanation.state or "not kept any more"
    if explanation.state == "finished":
        finish = FinishReason.Name(explanation.finish_reason)
        how += f" ({finish.removeprefix('FINISH_REASON_').lower()})"
    if explanation.HasField("error"):
        how += f": {explanation.error.code}: {explanation.error.message}"
    return how


def _stage_table(explanation: ExplainResponse) -> Table:
    """Return the table of stages. Together they are the time to the first token.

    The bar of each stage begins where the one of the previous stage ended.
    """
    timeline = explanation.timeline
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (("stage", "left"), ("ms", "right"), ("share", "right"), ("", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=True)
    start = 0.0
    for name, seconds in stage_seconds(timeline).items():
        share = seconds / timeline.ttft if timeline.ttft else 0.0
        table.add_row(
            name.replace("_", " "),
            _format_ms(seconds),
            f"{share:.0%}",
            _waterfall_bar(start, share),
        )
        start += share
    reached = "[bold]time to first token[/]" if explanation.output_tokens else "no token yet"
    table.add_row(reached, f"[bold]{_format_ms(timeline.ttft)}[/]", "", "the sum")
    token_seconds = (
        explanation.decode / (explanation.output_tokens - 1)
        if explanation.output_tokens > 1
        else None
    )
    pace = (
        f"{explanation.output_tokens - 1} more tokens, {_format_ms(token_seconds)} each"
        if token_seconds is not None
        else ""
    )
    table.add_row("decode", _format_ms(explanation.decode), "", pace)
    table.add_row("whole request", _format_ms(timeline.total), "", "")
    return table


def _waterfall_bar(begin: float, share: float) -> str:
    """Return a bar of `share` of the width that starts at the share `begin`.

    A stage that took any time at all is visible.
    """
    start, width = round(begin * _BAR_WIDTH), share * _BAR_WIDTH
    full_cells, eighths = int(width), int((width - int(width)) * 8)
    if share > 0 and not full_cells and not eighths:
        eighths = 1
    return " " * min(start, _BAR_WIDTH - 1) + "█" * full_cells + _EIGHTHS[eighths].strip()


def _token_sources(explanation: ExplainResponse) -> str:
    sources = explanation.sources
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
    return (
        f"prompt: {explanation.prompt_tokens} tokens{origin}\n"
        f"output: {explanation.output_tokens} of at most {explanation.max_tokens} tokens"
        + _draft_counts(explanation.attempts)
    )


def _draft_counts(attempts: Sequence[AttemptReport]) -> str:
    """How speculative decoding went, in all attempts; "" without any."""
    drafted = sum(attempt.draft_tokens for attempt in attempts)
    accepted = sum(attempt.accepted_draft_tokens for attempt in attempts)
    return f"; {accepted} of {drafted} draft tokens accepted" if drafted else ""


def _attempt_table(explanation: ExplainResponse) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("attempt", "placed", "over", "prefill", "decode", "context", "how it ended"):
        table.add_column(
            heading, justify="right" if heading in ("placed", "over", "context") else "left"
        )
    for attempt in explanation.attempts:
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
    """Name the chosen prefill node, if any, and say whether it was needed."""
    if not attempt.prefill_node:
        return "-"
    return f"{attempt.prefill_node}, not needed" if attempt.way == "local" else attempt.prefill_node


def _attempt_end(attempt: AttemptReport) -> str:
    return _attempt_outcome(attempt) + _attempt_remarks(attempt)


def _attempt_remarks(attempt: AttemptReport) -> str:
    held_back = (
        f"; the retry budget had held it back for {_format_ms(attempt.held_back)} ms"
        if attempt.held_back
        else ""
    )
    return held_back + ("; a probe of two nodes that had been kept apart" if attempt.probe else "")


def _attempt_outcome(attempt: AttemptReport) -> str:
    if not attempt.ended:
        return "runs"
    if attempt.ended == "refused":
        return f"refused: needed {attempt.needed} blocks, {attempt.free} were free"
    return f"{attempt.ended}: {attempt.reason}" if attempt.reason else attempt.ended


def _candidate_table(attempt: AttemptReport) -> Table:
    """Return the nodes that were considered for the last attempt.

    `predicted` is what the policy ranks by: for a prefill node the time until the prompt is
    computed and handed over, for a decode node the time of the whole answer.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    numbers = ("requests", "tokens to compute", "room", "tokens held", "predicted ms")
    for heading in (f"considered for attempt {attempt.number}", "role", *numbers, ""):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for candidate in attempt.considered:
        to_compute = str(candidate.uncomputed_tokens) if candidate.role == "prefill" else "-"
        predicted = (
            _format_ms(candidate.predicted_seconds)
            if candidate.HasField("predicted_seconds")
            else "-"
        )
        counts = (
            str(candidate.attempts),
            to_compute,
            str(candidate.room),
            str(candidate.held_tokens),
            predicted,
        )
        table.add_row(
            escape(candidate.node), candidate.role, *counts, _candidate_verdict(candidate)
        )
    return table


def _prediction_table(explanation: ExplainResponse) -> Table:
    """Compare what was predicted for the last attempt with what happened.

    The predicted output is that of the whole attempt.
    """
    attempt, timeline = explanation.attempts[-1], explanation.timeline
    expected = attempt.predicted
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (f"expected of attempt {attempt.number}", "predicted", "real"):
        table.add_column(heading, justify="left" if heading.startswith("expected") else "right")
    computed = attempt.prefill_ended - attempt.placed if attempt.HasField("prefill_ended") else None
    first = (
        timeline.ttft - attempt.placed
        if explanation.output_tokens and timeline.ttft >= attempt.placed
        else None
    )
    step = (
        explanation.decode / (explanation.output_tokens - 1)
        if explanation.output_tokens > 1
        else None
    )
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
    table.add_row("output, tokens", f"{expected.output_tokens:.0f}", str(explanation.output_tokens))
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
    """Say where the prompt was computed, and what was predicted for both sites."""
    site = _PREFILL_SITES.get(attempt.way, attempt.way)
    text = f"prompt computed by: {site} ({_PLACEMENT_REASONS.get(attempt.why, attempt.why)}"
    if attempt.HasField("other_way"):
        chosen, other = _predicted_ttft(attempt.predicted), _predicted_ttft(attempt.other_way)
        text += (
            f": first token predicted after {_format_ms(chosen)} ms, "
            f"the other way after {_format_ms(other)} ms"
        )
    return text + ")"


def _predicted_ttft(prediction: Prediction) -> float:
    return prediction.queue + prediction.prefill + prediction.transfer


def _candidate_verdict(candidate: Candidate) -> str:
    if candidate.chosen:
        return "[green]chosen[/]"
    verdict = "could have" if candidate.able else "had no room"
    return (
        f"{verdict}: {_EXCLUSION_REASONS.get(candidate.because, candidate.because)}"
        if candidate.because
        else verdict
    )


def _choice_table(explanations: Sequence[ExplainResponse]) -> Table:
    """Return the choices of one answer, one row each. The id of a choice explains it alone."""
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
    for index, choice in enumerate(explanations):
        timeline = choice.timeline
        table.add_row(
            str(index),
            choice.request_id,
            _format_ms(timeline.ttft) if choice.output_tokens else "-",
            _format_ms(timeline.total) if choice.state else "-",
            str(choice.output_tokens) if choice.state else "-",
            escape(timeline.prefill_node or "-"),
            escape(timeline.decode_node or "-"),
            escape(_request_outcome(choice)),
        )
    return table


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
