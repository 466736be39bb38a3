"""What a hand-off between two nodes on GPUs costs the prefill that makes it.

    python -m benchmarks.device.handoff_slowdown [--prompts 128,2048] [--requests 16]
        [--transport auto]

One prefill and one decode node, and beside them a colocated one, with random weights of the shape
of an 8B Llama. Prompts are sent one at a time, each after the same pause, because a GPU that has
rested computes a little faster: to both clusters, and to the prefill node for one token, which it
answers without a hand-off. `exposed` is the time from the last layer computed to the last slab
landed, and `slowed by` is as in `baton explain` (docs/operating.md#what-a-hand-off-costs), also as
a share of the forward pass. It does not have what the device itself loses to copies and to other
nodes; the last line does, which compares what computing a prompt took with a hand-off, without one
on the same node, and on the colocated node. With two GPUs the prefill node shares one with the
colocated node, and the decode node has the other to itself; with one GPU all nodes share it.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import httpx2
from rich.console import Console

from baton.cli.supervisor.supervisor import Supervisor
from baton.config.pool_config import NO_POOL
from baton.errors import NodeFailed
from baton.pb import common_pb2, generation_pb2, generation_pb2_grpc
from benchmarks.clusters.llama_folders import LLAMA_CONFIGS, write_llama_folder
from benchmarks.clusters.local_cluster import entered_together, serve_model_folder
from benchmarks.figures.percentiles import percentile

_OUTPUT_TOKENS = 16  # enough that prefill has reported the hand-off before the answer ends
_WARM_UP = 3
_PAUSE_SECONDS = 0.1  # in which no GPU computes
_REPORT_SECONDS = 2.5  # within which nodes report what they have counted
_VOCABULARY = 500


@dataclass(frozen=True, slots=True)
class HandoffCosts:
    """Measurements of all prompts after the first few."""

    prompt_tokens: int
    ttfts: list[float]  # seconds, of the prefill and decode node
    colocated_ttfts: list[float]
    handoffs: list[common_pb2.HandoffReport]
    local_compute_seconds: float  # of a prompt that the prefill node keeps: the mean
    colocated_compute_seconds: float  # on the colocated node: the mean

    @property
    def compute_seconds(self) -> float:
        """Of a prompt that is handed over: the mean."""
        return statistics.mean(report.compute_seconds for report in self.handoffs)


async def measure(
    folder: Path, options: argparse.Namespace, console: Console
) -> list[HandoffCosts]:
    prompts = [int(word) for word in options.prompts.split(",")]
    settings: dict[str, Any] = {
        "start_timeout": options.seconds,
        "device": options.device,
        "load_format": "dummy",
        "kv_memory": str(options.kv_memory),
        "max_model_len": 2 * max(prompts),
        "max_num_seqs": 64,
        "pool_memory": NO_POOL,
        "transport": options.transport,
    }
    split_nodes: dict[str, Any] = {"mode": "disaggregated", "prefill": 1, "decode": 1}
    one_node: dict[str, Any] = {"mode": "colocated", "prefill": 0, "decode": 1}
    async with entered_together(
        serve_model_folder(console, folder, **settings, **split_nodes),
        serve_model_folder(console, folder, **settings, **one_node),
    ) as (split, colocated):
        return [
            await _measure_prompts(split, colocated, tokens, options.requests) for tokens in prompts
        ]


async def _measure_prompts(
    split: Supervisor, colocated: Supervisor, tokens: int, requests: int
) -> HandoffCosts:
    """Send prompts of one length to both clusters in turns."""
    async with (
        grpc.aio.insecure_channel(split.endpoints.grpc) as split_channel,
        grpc.aio.insecure_channel(colocated.endpoints.grpc) as colocated_channel,
    ):
        split_stub = generation_pb2_grpc.GenerationStub(split_channel)
        colocated_stub = generation_pb2_grpc.GenerationStub(colocated_channel)
        rng = random.Random(tokens)
        answers, colocated_ttfts = [], []
        before = 0.0, 0.0
        for number in range(_WARM_UP + requests):
            if number == _WARM_UP:
                before = await _read_prefill_seconds(split), await _read_prefill_seconds(colocated)
            prompt = [rng.randrange(16, _VOCABULARY) for _ in range(tokens)]
            answers.append(await _send_request(split_stub, prompt))
            other = [rng.randrange(16, _VOCABULARY) for _ in range(tokens)]
            await _send_request(split_stub, other, max_tokens=1)
            colocated_ttfts.append((await _send_request(colocated_stub, prompt))[0])
        after = await _read_prefill_seconds(split), await _read_prefill_seconds(colocated)
    seconds = [last - first for first, last in zip(before, after, strict=True)]
    handoffs = [answer.timeline.handoff for _, answer in answers[_WARM_UP:]]
    if not all(handoff.transport for handoff in handoffs):
        raise NodeFailed("an answer had no hand-off")
    seconds[0] -= sum(handoff.compute_seconds for handoff in handoffs)
    ttfts = [ttft for ttft, _ in answers[_WARM_UP:]]
    means = (total / requests for total in seconds)
    return HandoffCosts(tokens, ttfts, colocated_ttfts[_WARM_UP:], handoffs, *means)


async def _read_prefill_seconds(cluster: Supervisor) -> float:
    """Seconds that the cluster's devices have computed prompts."""
    await asyncio.sleep(_REPORT_SECONDS)
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"http://{cluster.endpoints.admin}/metrics")).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("baton_device_seconds_total{") and 'phase="prefill"' in line
    )


async def _send_request(
    stub: generation_pb2_grpc.GenerationStub,
    prompt: list[int],
    max_tokens: int = _OUTPUT_TOKENS,
) -> tuple[float, generation_pb2.GenerateResponse]:
    """Seconds to the first token, and the last message of the answer."""
    await asyncio.sleep(_PAUSE_SECONDS)
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
    )
    first, answer, started = None, None, time.perf_counter()
    async for answer in stub.Generate(request, timeout=60.0):
        if first is None and answer.token_ids:
            first = time.perf_counter()
    if first is None or answer is None:
        raise NodeFailed("an answer had no tokens")
    return first - started, answer


def report(costs: HandoffCosts) -> list[str]:
    """Lines with medians and the largest values."""
    reports = costs.handoffs
    figures = {
        "time to first token, ms": [ttft * 1e3 for ttft in costs.ttfts],
        "time to first token of the colocated node, ms": [
            ttft * 1e3 for ttft in costs.colocated_ttfts
        ],
        "forward pass, ms": [one.compute_seconds * 1e3 for one in reports],
        "exposed, ms": [one.exposed_seconds * 1e3 for one in reports],
        "commit, ms": [one.commit_seconds * 1e3 for one in reports],
        "slowed by, ms": [one.slowed_seconds * 1e3 for one in reports],
        "slowed by, % of the forward pass": [
            one.slowed_seconds / one.compute_seconds * 1e2 for one in reports
        ],
        "layers at once": [float(one.group_layers) for one in reports],
    }
    transports = ", ".join(sorted({one.transport for one in reports}))
    lines = [f"{costs.prompt_tokens} tokens: {len(reports)} hand-offs over {transports}"]
    lines += [
        f"{name}: median {percentile(values, 50):.2f}, largest {max(values):.2f}"
        for name, values in figures.items()
    ]
    seconds, others = (
        costs.compute_seconds,
        {
            "without a hand-off": costs.local_compute_seconds,
            "colocated": costs.colocated_compute_seconds,
        },
    )
    compared = ", ".join(
        f"{name} {other * 1e3:.2f} ({seconds / other:.3f} of it)" for name, other in others.items()
    )
    lines.append(f"computing a prompt, ms: mean {seconds * 1e3:.2f}, {compared}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="128,2048", help="tokens (128,2048)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--kv-memory", type=int, default=6 << 30)
    parser.add_argument("--seconds", type=float, default=150.0, help="for each start (150)")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="baton-bench-slowdown-") as scratch:
        folder = write_llama_folder(Path(scratch, "model"), LLAMA_CONFIGS[options.model])
        measured = asyncio.run(measure(folder, options, Console(stderr=True)))
    for line in (line for costs in measured for line in report(costs)):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
