"""`granularity`: hand-offs layer by layer, whole and adaptive, over each transport.

The processes are real: three prefill nodes that differ in `--layers-per-message` alone, and one
decode node. Every prompt is new and is computed in one step, so that `whole` is sent when all of it
is computed. In every round each node gets prompts of each length, in turns, while the other two
prefill nodes are drained. `landed` is the time on the prefill node from the start of computing
until the last slab has landed: the forward pass and the exposed part of the transfer. `cost` is
what the hand-off adds to it: the exposed part, and the time by which the forward pass was slowed. A
ratio is the median over the rounds of the ratio within a round, which other load of the machine
affects less than a ratio of medians. Other load makes forward passes longer, so that ratios of
`landed` need an idle machine; those of `cost` need it less.
"""

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
from rich.console import Console
from rich.table import Table

from baton.errors import NodeFailed
from baton.pb import cluster_pb2, cluster_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from baton.types import STAGED_TRANSPORTS
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import NARROW_SHAPE
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.report import ResultRow, make_row

HELP = "hand-offs layer by layer, whole and adaptive, over each transport"
MODES = {"layers": 1, "whole": NARROW_SHAPE.layers, "adaptive": 0}  # --layers-per-message
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_OF_WHOLE = 1.03  # landed, adaptive / whole; as much is noise
_OUTPUT_TOKENS = 4
_WARM_UP_ROUNDS = 1
_DEADLINE = 120.0  # seconds of one request
# With two heads, so that attention to the longest prompts does not take most of the run.
_SHAPE = replace(NARROW_SHAPE, heads=2, context=PROMPT_TOKENS[-1] + 64)


@dataclass(frozen=True, slots=True)
class GranularitySample:
    """One hand-off."""

    report: common_pb2.HandoffReport

    @property
    def landed_seconds(self) -> float:
        return self.report.compute_seconds + self.report.exposed_seconds

    @property
    def cost_seconds(self) -> float:
        return self.report.slowed_seconds + self.report.exposed_seconds


Samples = Mapping[tuple[int, str], Sequence[GranularitySample]]  # by prompt length and mode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport",
        choices=(*STAGED_TRANSPORTS, "all"),
        default="all",
        help="which one (default all)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument(
        "--prompts",
        type=lambda text: tuple(int(length) for length in text.split(",")),
        default=PROMPT_TOKENS,
        help="lengths of prompts in tokens (default 64 to 8192)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows: list[ResultRow] = []
    for transport in STAGED_TRANSPORTS if options.transport == "all" else (options.transport,):
        samples = asyncio.run(_measure_transport(transport, options, console))
        print_table(console, transport, samples)
        rows += to_rows(transport, samples, command)
    return rows


def to_rows(transport: str, samples: Samples, command: str) -> list[ResultRow]:
    rows = []
    for tokens in dict.fromkeys(tokens for tokens, _ in samples):
        prefix = f"granularity/{transport}/{tokens}"
        for mode in MODES:
            landed = [sample.landed_seconds for sample in samples[tokens, mode]]
            cost = [sample.cost_seconds for sample in samples[tokens, mode]]
            for name, values in (("landed", landed), ("cost", cost)):
                value = percentile(values, 50) * 1e3
                rows.append(make_row(f"{prefix}/{mode}_{name}", value, "ms", command))
        for mode in ("layers", "adaptive"):
            limit = MAX_OF_WHOLE if mode == "adaptive" else None
            ratio = _median_ratio(samples[tokens, mode], samples[tokens, "whole"])
            rows.append(make_row(f"{prefix}/{mode}_of_whole", ratio, "x whole", command, limit))
    return rows


def print_table(console: Console, transport: str, samples: Samples) -> None:
    title = f"granularity over {transport}: medians, in milliseconds unless said otherwise"
    table = Table("prompt", title=title, title_justify="left", box=None, header_style="bold")
    for mode in MODES:
        for figure in ("landed", "exposed", "slowed", "cost"):
            table.add_column(f"{mode}\n{figure}", justify="right")
    for heading in ("layers\nat once", "landed:\nlayers\nof whole", "landed:\nadaptive\nof whole"):
        table.add_column(heading, justify="right")
    for tokens in dict.fromkeys(tokens for tokens, _ in samples):
        cells = [f"{tokens}"]
        for mode in MODES:
            of_mode = samples[tokens, mode]
            cells += [
                f"{percentile(values, 50) * 1e3:.1f}"
                for values in (
                    [sample.landed_seconds for sample in of_mode],
                    [sample.report.exposed_seconds for sample in of_mode],
                    [sample.report.slowed_seconds for sample in of_mode],
                    [sample.cost_seconds for sample in of_mode],
                )
            ]
        chosen = [float(sample.report.group_layers) for sample in samples[tokens, "adaptive"]]
        cells.append(f"{percentile(chosen, 50):.0f}")
        for mode in ("layers", "adaptive"):
            ratio = _median_ratio(samples[tokens, mode], samples[tokens, "whole"])
            cells.append(f"{ratio:.2f}")
        table.add_row(*cells)
    console.print(table)


def _median_ratio(
    of_mode: Sequence[GranularitySample], whole: Sequence[GranularitySample]
) -> float:
    ratios = [
        one.landed_seconds / other.landed_seconds for one, other in zip(of_mode, whole, strict=True)
    ]
    return percentile(ratios, 50)


async def _measure_transport(
    transport: str, options: argparse.Namespace, console: Console
) -> Samples:
    settings = {
        "transport": transport,
        "prefill": len(MODES),
        "threads": "1",
        "max_batched_tokens": _SHAPE.context,
        "kv_memory": "384MiB",
        "pool_memory": "0",  # blocks that decode finds in a pool are not handed over
    }
    own = {
        f"prefill-{number}": {"BATON_LAYERS_PER_MESSAGE": str(layers)}
        for number, layers in enumerate(MODES.values())
    }
    random_source = random.Random(options.seed)
    samples: defaultdict[tuple[int, str], list[GranularitySample]] = defaultdict(list)
    async with (
        start_local_cluster(console, _SHAPE, "granularity", own=own, **settings) as cluster,
        grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel,
    ):
        nodes = PrefillNodeSelector(cluster_pb2_grpc.ClusterStub(channel))
        stub = generation_pb2_grpc.GenerationStub(channel)
        await nodes.wait_for_nodes()
        turns = [
            (number, tokens)
            for number in range(-_WARM_UP_ROUNDS, options.rounds)
            for tokens in options.prompts
            for _ in range(_count_repeats(tokens))
        ]
        for turn, (number, tokens) in enumerate(turns):
            modes = list(MODES)
            shift = turn % len(modes)  # each mode comes first as often as the others
            for mode in modes[shift:] + modes[:shift]:
                await nodes.use_only(f"prefill-{modes.index(mode)}")
                sample = await _measure_request(stub, nodes, random_source, tokens)
                _check_sample(sample, transport, mode)
                if number >= 0:
                    samples[tokens, mode].append(sample)
    return samples


def _count_repeats(tokens: int) -> int:
    """How often a length has its turn in a round: short prompts vary more, and take less time."""
    return max(1, min(4, 2048 // tokens))


class PrefillNodeSelector:
    """Leaves one prefill node in service at a time."""

    def __init__(self, stub: cluster_pb2_grpc.ClusterStub) -> None:
        self.stub = stub
        self._used = ""

    async def wait_for_nodes(self) -> None:
        """Return once all nodes are there: a cluster is ready with one of each role."""
        async with asyncio.timeout(_DEADLINE):
            async for status in self.stub.Watch(cluster_pb2.WatchRequest(interval_seconds=0.1)):
                if len(status.nodes) > len(MODES):
                    return

    async def use_only(self, name: str) -> None:
        if name == self._used:
            return
        await self.stub.Undrain(cluster_pb2.UndrainRequest(node=name))
        others = [f"prefill-{number}" for number in range(len(MODES))]
        for other in others if not self._used else [self._used]:
            if other != name:
                await self.stub.Drain(cluster_pb2.DrainRequest(node=other))
        self._used = name


async def _measure_request(
    stub: generation_pb2_grpc.GenerationStub,
    nodes: PrefillNodeSelector,
    random_source: random.Random,
    tokens: int,
) -> GranularitySample:
    prompt = [random_source.randrange(16, _SHAPE.vocabulary) for _ in range(tokens)]
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        max_tokens=_OUTPUT_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
    request_id = ""
    async for answer in stub.Generate(request, timeout=_DEADLINE):
        request_id = answer.request_id
    # The report of the hand-off may come after the end of the answer.
    async with asyncio.timeout(_DEADLINE):
        while True:
            explained = await nodes.stub.Explain(cluster_pb2.ExplainRequest(request_id=request_id))
            if explained.timeline.handoff.transport:
                return GranularitySample(explained.timeline.handoff)
            await asyncio.sleep(0.02)


def _check_sample(sample: GranularitySample, transport: str, mode: str) -> None:
    """Raise NodeFailed unless the hand-off was the one that was asked for."""
    layers = sample.report.group_layers
    if sample.report.transport != transport or layers != (MODES[mode] or layers):
        raise NodeFailed(
            f"handed over {layers} layers at once over {sample.report.transport}: "
            f"{mode} over {transport} was asked for"
        )
