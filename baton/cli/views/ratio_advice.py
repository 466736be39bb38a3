"""The advice on the ratio, in words and as a table."""

from collections.abc import Iterator

from rich.table import Table

from baton.pb.cluster_pb2 import RatioAdvice, SplitForecast


def describe_demand(advice: RatioAdvice) -> Iterator[str]:
    """What it rests on."""
    yield (
        f"asked in {advice.seconds:.0f} s: {advice.requests_per_second:.2f} requests/s "
        f"(burstiness {advice.burstiness:.1f}), prompts of {advice.prompt_tokens_mean:.0f} "
        f"± {advice.prompt_tokens_deviation:.0f} tokens, {1.0 - advice.computed_share:.0%} of them cached, "
        f"answers of {advice.output_tokens_mean:.0f} ± {advice.output_tokens_deviation:.0f}"
    )
    yield (
        f"to do: {advice.prefill_tokens_per_second:.0f} prefill tokens/s, "
        f"{advice.decode_tokens_per_second:.0f} decode tokens/s; waiting: {advice.queued} in the coordinator, "
        f"{advice.waiting_prefill} on prefill nodes, {advice.waiting_decode} on decode nodes"
    )
    if advice.ended:
        yield (
            f"served with {advice.present_prefill}:{advice.present_decode}: {advice.good} of {advice.ended} within "
            f"{advice.slo}; mean waits: {_format_seconds(advice.queue_seconds)} queue, {_format_seconds(advice.prefill_seconds)} prefill, "
            f"{_format_seconds(advice.transfer_seconds)} hand-off"
        )


def forecast_table(advice: RatioAdvice) -> Table:
    """Forecasts of the best split, its neighbours and the present one."""
    shown = Table(title="forecast", title_justify="left", box=None, header_style="bold")
    shown.add_column("ratio", no_wrap=True)
    for heading in (
        "TTFT p50 / p90 / p99",
        "TPOT",
        "within SLO",
        "goodput",
        "load prefill / decode",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for one in advice.forecasts:
        shown.add_row(
            f"{one.prefill}:{one.decode}",
            " / ".join(
                _format_seconds(seconds) for seconds in (one.ttft_p50, one.ttft_p90, one.ttft_p99)
            ),
            _format_seconds(one.tpot),
            f"{one.share:.0%}",
            f"{one.goodput:.2f}/s",
            f"{one.prefill_load:.0%} / {one.decode_load:.0%}",
            ", ".join(_split_marks(advice, one)),
        )
    return shown


def apply_command(advice: RatioAdvice) -> str:
    """The command, "" if the best split is there already."""
    if (advice.prefill, advice.decode) == (advice.present_prefill, advice.present_decode):
        return ""
    return f"baton ratio set {advice.prefill}:{advice.decode}"


def _split_marks(advice: RatioAdvice, one: SplitForecast) -> Iterator[str]:
    if (one.prefill, one.decode) == (advice.prefill, advice.decode):
        yield "best"
    if (one.prefill, one.decode) == (advice.present_prefill, advice.present_decode):
        yield "present"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10.0 else f"{seconds:.0f} s"
