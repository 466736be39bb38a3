"""What a hand-off between two nodes on GPUs costs the prefill that makes it.

    python -m benchmarks.device.handoff_slowdown [--prompts 128,2048] [--requests 10]
        [--rounds 3] [--transport auto]

One prefill and one decode node, and beside them a colocated one, with random weights of the shape
of an 8B Llama. Prompts are sent one at a time, each after the same pause, because a GPU that has
rested computes a little faster: to both clusters, and to the prefill node for one token, which it
answers without a hand-off. `exposed` is the time from the last layer computed to the last slab
landed, and `slowed by` is as in `baton explain` (docs/operating.md#what-a-hand-off-costs), also as
a share of the forward pass. It does not have what the device itself loses to copies and to other
nodes; the last line does, which compares what computing a prompt took with a hand-off, without one
on the same node, and on the colocated node: the mean of each round, and the medians of the rounds.
With two GPUs the prefill node shares one with the
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
    """Measurements of all prompts of one length after the first few."""

    prompt_tokens: int
    ttfts: list[float]  # seconds, of the prefill and decode node
    colocated_ttfts: list[float]
    handoffs: list[common_pb2.HandoffReport]
    rounds: list["ComputedRound"]


@dataclass(frozen=True, slots=True)
class ComputedRound:
    """What computing a prompt took in one round, as means in seconds."""

    handed_over: float
    kept: float  # by the prefill node
    colocated: float  # on the colocated node


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
            await _measure_prompts(split, colocated, tokens, options.requests, options.rounds)
            for tokens in prompts
        ]


async def _measure_prompts(
    split: Supervisor, colocated: Supervisor, tokens: int, requests: int, rounds: int
) -> HandoffCosts:
    """Send prompts of one length to both clusters in turns."""
    async with (
        grpc.aio.insecure_channel(split.endpoints.grpc) as split_channel,
        grpc.aio.insecure_channel(colocated.endpoints.grpc) as colocated_channel,
    ):
        sender = _PromptSender(
            generation_pb2_grpc.GenerationStub(split_channel),
            generation_pb2_grpc.GenerationStub(colocated_channel),
            tokens,
        )
        await sender.send_prompts(_WARM_UP)
        costs = HandoffCosts(tokens, [], [], [], [])
        totals = await _read_prefill_seconds(split), await _read_prefill_seconds(colocated)
        for _ in range(rounds):
            answers, colocated_ttfts = await sender.send_prompts(requests)
            handoffs = [answer.timeline.handoff for _, answer in answers]
            if not all(handoff.transport for handoff in handoffs):
                raise NodeFailed("an answer had no hand-off")
            before, totals = (
                totals,
                (await _read_prefill_seconds(split), await _read_prefill_seconds(colocated)),
            )
            own, other = [last - first for first, last in zip(before, totals, strict=True)]
            handed = sum(handoff.compute_seconds for handoff in handoffs)
            costs.rounds.append(
                ComputedRound(handed / requests, (own - handed) / requests, other / requests)
            )
            costs.handoffs.extend(handoffs)
            costs.ttfts.extend(ttft for ttft, _ in answers)
            costs.colocated_ttfts.extend(colocated_ttfts)
    return costs


# Seconds to the first token, and the last message of the answer.
_Answer = tuple[float, generation_pb2.GenerateResponse]


class _PromptSender:
    """Sends each prompt to a cluster with hand-offs, to its prefill node alone, and colocated."""

    def __init__(
        self,
        split: generation_pb2_grpc.GenerationStub,
        colocated: generation_pb2_grpc.GenerationStub,
        tokens: int,
    ) -> None:
        self._split = split
        self._colocated = colocated
        self._tokens = tokens
        self._rng = random.Random(tokens)

    async def send_prompts(self, count: int) -> tuple[list[_Answer], list[float]]:
        """The answers with a hand-off, and seconds to the first token of the colocated node."""
        answers, colocated_ttfts = [], []
        for _ in range(count):
            prompt = self._draw_prompt()
            answers.append(await _send_request(self._split, prompt))
            await _send_request(self._split, self._draw_prompt(), max_tokens=1)
            colocated_ttfts.append((await _send_request(self._colocated, prompt))[0])
        return answers, colocated_ttfts

    def _draw_prompt(self) -> list[int]:
        return [self._rng.randrange(16, _VOCABULARY) for _ in range(self._tokens)]


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
) -> _Answer:
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
    rounds = costs.rounds
    handed, kept, colocated = [
        statistics.median(getattr(one, name) for one in rounds)
        for name in ("handed_over", "kept", "colocated")
    ]
    ratios = [
        statistics.median(one.handed_over / getattr(one, name) for one in rounds)
        for name in ("kept", "colocated")
    ]
    lines.append(
        f"computing a prompt, ms: {handed * 1e3:.2f}, kept {kept * 1e3:.2f} ({ratios[0]:.3f} of"
        f" it), colocated {colocated * 1e3:.2f} ({ratios[1]:.3f} of it)"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="128,2048", help="tokens (128,2048)")
    parser.add_argument("--requests", type=int, default=10, help="in a round (10)")
    parser.add_argument("--rounds", type=int, default=3)
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
