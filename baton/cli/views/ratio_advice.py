"""The ratio advice as text and as a table."""

from collections.abc import Iterator

from rich.table import Table

from baton.pb.cluster_pb2 import RatioAdvice, SplitForecast


def describe_demand(advice: RatioAdvice) -> Iterator[str]:
    """Yield lines about the demand and the service that the advice is based on."""
    yield (
        f"asked in {advice.seconds:.0f} s: {advice.requests_per_second:.2f} requests/s "
        f"(burstiness {advice.burstiness:.1f}), prompts of {advice.prompt_tokens_mean:.0f} "
        f"± {advice.prompt_tokens_deviation:.0f} tokens, "
        f"{1.0 - advice.computed_share:.0%} of them cached, "
        f"answers of {advice.output_tokens_mean:.0f} ± {advice.output_tokens_deviation:.0f}"
    )
    yield (
        f"to do: {advice.prefill_tokens_per_second:.0f} prefill tokens/s, "
        f"{advice.decode_tokens_per_second:.0f} decode tokens/s; "
        f"waiting: {advice.queued} in the coordinator, "
        f"{advice.waiting_prefill} on prefill nodes, {advice.waiting_decode} on decode nodes"
    )
    if advice.ended:
        yield (
            f"served with {advice.present_prefill}:{advice.present_decode}: "
            f"{advice.good} of {advice.ended} within {advice.slo}; "
            f"mean waits: {_format_seconds(advice.queue_seconds)} queue, "
            f"{_format_seconds(advice.prefill_seconds)} prefill, "
            f"{_format_seconds(advice.transfer_seconds)} hand-off"
        )


def forecast_table(advice: RatioAdvice) -> Table:
    """Return the forecasts of the best split, of its neighbours and of the present one."""
    table = Table(title="forecast", title_justify="left", box=None, header_style="bold")
    table.add_column("ratio", no_wrap=True)
    for heading in (
        "TTFT p50 / p90 / p99",
        "TPOT",
        "within SLO",
        "goodput",
        "load prefill / decode",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for forecast in advice.forecasts:
        table.add_row(
            f"{forecast.prefill}:{forecast.decode}",
            " / ".join(
                _format_seconds(seconds)
                for seconds in (forecast.ttft_p50, forecast.ttft_p90, forecast.ttft_p99)
            ),
            _format_seconds(forecast.tpot),
            f"{forecast.share:.0%}",
            f"{forecast.goodput:.2f}/s",
            f"{forecast.prefill_load:.0%} / {forecast.decode_load:.0%}",
            ", ".join(_split_marks(advice, forecast)),
        )
    return table


def apply_command(advice: RatioAdvice) -> str:
    """Return the command that applies the advice, empty if the best split is there already."""
    if (advice.prefill, advice.decode) == (advice.present_prefill, advice.present_decode):
        return ""
    return f"baton ratio set {advice.prefill}:{advice.decode}"


def _split_marks(advice: RatioAdvice, forecast: SplitForecast) -> Iterator[str]:
    if (forecast.prefill, forecast.decode) == (advice.prefill, advice.decode):
        yield "best"
    if (forecast.prefill, forecast.decode) == (advice.present_prefill, advice.present_decode):
        yield "present"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 10.0 else f"{seconds:.0f} s"
