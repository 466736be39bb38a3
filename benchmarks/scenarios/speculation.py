"""Speculative decoding beside none: clusters of one model, one request at a time.

The model is made to repeat a passage of PASSAGE_TOKENS tokens in greedy outputs. At temperature 2
its outputs are nearly random, and hardly a draft of the n-gram method is right. A draft model has
one layer of DRAFT_LAYERS_SHARE. The clusters get each prompt, one right after the other. A ratio is
the median of its pairs of requests.

Equal processes differ by some percent, for example by where their memory lies. So there is a third
cluster, the control, without speculation: how far its ratio is from 1 is what cannot be told apart.

What the formula of Leviathan et al. predicts stands beside what was measured:

    (1 - a**(k + 1)) / ((1 - a) (1 + k c))

    a    share of draft tokens that were right, of those whose predecessors were
    k    draft tokens of a step that verified some
    c    what a draft token adds to a step, with what a draft model takes for it, as a share of a
         step without: from the time per step
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from baton.pb import cluster_pb2, cluster_pb2_grpc
from benchmarks.clusters.local_cluster import serve_model_folder
from benchmarks.clusters.random_models import DEMO_SHAPE, SMALL_SHAPE, build_random_model
from benchmarks.figures.report import ResultRow, make_row
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import parse_url
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest
from node_engine.core.speculation.draft_lengths import compute_speedup

SHAPES = {"demo": DEMO_SHAPE, "small": SMALL_SHAPE}
PASSAGE_TOKENS = 24
TEMPERATURES = {"repetitive": 0.0, "random": 2.0}
LEAST_RATIOS = {  # of tokens/s, with speculation
    "ngram": {"repetitive": 1.5, "random": 0.97},
    "draft": {"repetitive": 1.2, "random": 0.97},
}
OFF, ON, CONTROL = METHODS = ("none", "speculative", "control")
DRAFT_LAYERS_SHARE = 8  # layers of the served model to one of the draft model
_HEARTBEAT_SECONDS = 0.2
_SETTINGS: Mapping[str, Any] = {
    "prefill": 0,
    "mode": "colocated",
    "pool_memory": "0",
    "heartbeat": _HEARTBEAT_SECONDS,
}
_TIMEOUT = 120.0  # seconds
_WARM_UP = 2  # requests
# Unless options say otherwise: an output repeats the passage several times.
_PROMPT_TOKENS, _OUTPUT_TOKENS, _REQUESTS = 64, 256, 4


def _make_lists() -> dict[str, list[float]]:
    return {method: [] for method in METHODS}


@dataclass(slots=True)
class WorkloadRounds:
    """Measurements of one workload; each list has one value per request."""

    tokens_per_second: dict[str, list[float]] = field(default_factory=_make_lists)
    token_seconds: dict[str, list[float]] = field(default_factory=_make_lists)
    counters: dict[str, float] = field(default_factory=dict)  # of drafts, added up
    output_tokens: int = 0  # with speculation, without the first one of each request

    def compute_ratio(self, method: str = ON) -> float:
        """The median over requests of the cluster's tokens/s divided by those without drafts."""
        pairs = zip(self.tokens_per_second[method], self.tokens_per_second[OFF], strict=True)
        return median(one / off for one, off in pairs)

    def count_tokens(self, result: str) -> float:
        return self.counters.get(f'baton_draft_tokens_total{{result="{result}"}}', 0.0)


@dataclass(frozen=True, slots=True)
class FormulaTerms:
    """The terms of the formula, as measured."""

    acceptance_rate: float
    num_drafts: float  # of a step that verified some
    relative_cost: float

    @property
    def speedup(self) -> float:
        return compute_speedup(self.acceptance_rate, self.num_drafts, self.relative_cost)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "speculation", "clusters of a random model, with speculative decoding and without"
    )
    group.add_argument(
        "--speculative",
        choices=list(LEAST_RATIOS),
        help="compare this method with none, at concurrency 1",
    )
    group.add_argument(
        "--speculative-tokens", type=int, help="draft tokens at most (default: the node's)"
    )
    group.add_argument(
        "--shape", choices=SHAPES, default="demo", help="size of the model (default demo)"
    )


async def compare_speculation(
    options: argparse.Namespace, console: Console, command: str
) -> list[ResultRow]:
    """Return the rows. Raises ValueError or TimeoutError when it cannot be measured."""
    shape = replace(SHAPES[options.shape], passage_tokens=PASSAGE_TOKENS)
    settings: dict[str, Any] = {"speculative": options.speculative}
    if options.speculative_tokens:
        settings["speculative_tokens"] = options.speculative_tokens
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-"))
        model = await asyncio.to_thread(build_random_model, Path(folder, options.shape), shape)
        if options.speculative == "draft":
            small = replace(shape, layers=max(1, shape.layers // DRAFT_LAYERS_SHARE))
            draft = await asyncio.to_thread(build_random_model, Path(folder, "draft"), small)
            # Training it again may break ties in another way.
            shutil.copy(model / "tokenizer.json", draft)
            settings["draft_model"] = str(draft)
        clusters = {
            method: await stack.enter_async_context(_serve(console, model, own))
            for method, own in ((OFF, {}), (ON, settings), (CONTROL, {}))
        }
        rounds = {name: WorkloadRounds() for name in TEMPERATURES}
        for number in range(options.rounds):
            for name, result in rounds.items():
                await _play_round(clusters, name, result, options, number)
    console.print(build_table(rounds))
    return [
        row
        for name, result in rounds.items()
        for row in _to_rows(options.speculative, name, result, command)
    ]


@dataclass(frozen=True, slots=True)
class _ServedModel:
    client: CompletionsClient
    stub: cluster_pb2_grpc.ClusterStub

    async def get_draft_counters(self) -> dict[str, float]:
        """The counters of drafts, once the node has reported those of its last step."""
        await asyncio.sleep(3 * _HEARTBEAT_SECONDS)
        status = await self.stub.Status(cluster_pb2.StatusRequest(), timeout=_TIMEOUT)
        return {
            name: value
            for node in status.nodes
            for name, value in node.stats.counters.items()
            if name.startswith("baton_draft")
        }


@asynccontextmanager
async def _serve(
    console: Console, model: Path, own: Mapping[str, Any]
) -> AsyncIterator[_ServedModel]:
    async with (
        serve_model_folder(console, model, **_SETTINGS, **own) as cluster,
        grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel,
    ):
        target = parse_url(f"http://{cluster.endpoints.http}")
        client = await CompletionsClient(target, "", "", 1000, _TIMEOUT).probe_features()
        for number in range(_WARM_UP):
            await client.measure_request(PlannedRequest(0.0, 16, 32, seed=number), 0.0)
        yield _ServedModel(client, cluster_pb2_grpc.ClusterStub(channel))


async def _play_round(
    clusters: Mapping[str, _ServedModel],
    name: str,
    result: WorkloadRounds,
    options: argparse.Namespace,
    number: int,
) -> None:
    """Send each prompt to every cluster, one after the other.

    So a change of the machine's speed affects all alike. The cluster that is first changes with
    each prompt.
    """
    prompt, output = int(options.prompt or _PROMPT_TOKENS), int(options.output or _OUTPUT_TOKENS)
    plan = [
        PlannedRequest(0.0, prompt, output, seed=10_000 * number + place)
        for place in range(options.requests or _REQUESTS)
    ]
    measured: dict[str, list[RequestMeasurement]] = {method: [] for method in METHODS}
    before = await clusters[ON].get_draft_counters()
    for place, request in enumerate(plan):
        first = (number + place) % len(METHODS)
        for method in METHODS[first:] + METHODS[:first]:
            client = replace(clusters[method].client, temperature=TEMPERATURES[name])
            measurement = await client.measure_request(request, time.perf_counter())
            if measurement.error:
                raise ValueError(f"a request failed: {measurement.error}")
            measured[method].append(measurement)
    after = await clusters[ON].get_draft_counters()
    for method, measurements in measured.items():
        for measurement in measurements:
            _add_measurement(result, method, measurement)
    for counter, value in after.items():
        gained = value - before.get(counter, 0.0)
        result.counters[counter] = result.counters.get(counter, 0.0) + gained


def _add_measurement(result: WorkloadRounds, method: str, measured: RequestMeasurement) -> None:
    seconds = measured.ended_at - measured.due_at
    later = measured.received_tokens - 1
    result.tokens_per_second[method].append(measured.received_tokens / seconds)
    decode_seconds = measured.token_arrivals[-1][0] - measured.token_arrivals[0][0]
    result.token_seconds[method].append(decode_seconds / max(1, later))
    if method == ON:
        result.output_tokens += later


def measure_terms(result: WorkloadRounds) -> FormulaTerms | None:
    """The terms of the formula; None if no draft was verified."""
    accepted, rejected = result.count_tokens("accepted"), result.count_tokens("rejected")
    drafted = accepted + rejected + result.count_tokens("unused")
    num_drafts = result.counters.get("baton_drafts_total", 0.0)
    if not num_drafts or accepted + rejected == 0.0:
        return None
    # The seconds of all steps with speculation, in steps without.
    steps = result.output_tokens - accepted
    pairs = zip(result.token_seconds[ON], result.token_seconds[OFF], strict=True)
    total = median(on / off for on, off in pairs) * result.output_tokens
    return FormulaTerms(
        acceptance_rate=accepted / (accepted + rejected),
        num_drafts=drafted / num_drafts,
        relative_cost=max(0.0, total - steps) / drafted,
    )


def build_table(rounds: Mapping[str, WorkloadRounds]) -> Table:
    table = Table(title="one request at a time", title_justify="left", box=None)
    for heading in ("output", "tokens/s", ON, "ratio", CONTROL, "a", "k", "c", "formula"):
        table.add_column(heading, justify="left" if heading == "output" else "right")
    for name, result in rounds.items():
        terms = measure_terms(result)
        formula = (
            (
                f"{terms.acceptance_rate:.3f}",
                f"{terms.num_drafts:.2f}",
                f"{terms.relative_cost:.3f}",
                f"{terms.speedup:.2f}",
            )
            if terms
            else ("-",) * 4
        )
        table.add_row(
            name,
            f"{median(result.tokens_per_second[OFF]):.1f}",
            f"{median(result.tokens_per_second[ON]):.1f}",
            f"{result.compute_ratio():.3f}",
            f"{result.compute_ratio(CONTROL):.3f}",
            *formula,
        )
    return table


def _to_rows(method: str, name: str, result: WorkloadRounds, command: str) -> list[ResultRow]:
    prefix, terms = f"serve/speculative/{method}/{name}", measure_terms(result)
    rows = [
        make_row(f"{prefix}/plain", median(result.tokens_per_second[OFF]), "tokens/s", command),
        make_row(
            f"{prefix}/speculative", median(result.tokens_per_second[ON]), "tokens/s", command
        ),
        make_row(
            f"{prefix}/ratio", result.compute_ratio(), "times", command, LEAST_RATIOS[method][name]
        ),
        make_row(f"{prefix}/control", result.compute_ratio(CONTROL), "times", command),
    ]
    if terms is not None:
        rows += [
            make_row(f"{prefix}/acceptance", terms.acceptance_rate, "of draft tokens", command),
            make_row(f"{prefix}/drafts", terms.num_drafts, "tokens a draft", command),
            make_row(f"{prefix}/draft_cost", terms.relative_cost, "steps a draft token", command),
            make_row(f"{prefix}/formula", terms.speedup, "times", command),
        ]
    return rows
