"""What a hand-off between two nodes on GPUs costs the prefill that makes it.

    python -m benchmarks.device.handoff_slowdown [--prompt 2048] [--requests 16] [--transport auto]

One prefill and one decode node with random weights of the shape of an 8B Llama; prompts one at a
time. `exposed` is the time from the last layer computed to the last slab landed, and `slowed by` is
as in `baton explain` (docs/operating.md#what-a-hand-off-costs), also as a share of the forward
pass. With one GPU both nodes share it.
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from rich.console import Console

from baton.config.pool_config import NO_POOL
from baton.errors import NodeFailed
from baton.pb import common_pb2, generation_pb2, generation_pb2_grpc
from benchmarks.clusters.llama_folders import LLAMA_CONFIGS, write_llama_folder
from benchmarks.clusters.local_cluster import serve_model_folder
from benchmarks.figures.percentiles import percentile

_OUTPUT_TOKENS = 16  # enough that prefill has reported the hand-off before the answer ends
_WARM_UP = 3
_VOCABULARY = 500


async def measure(
    folder: Path, options: argparse.Namespace, console: Console
) -> list[tuple[float, common_pb2.HandoffReport]]:
    """The time to first token of each request, in seconds, and its hand-off."""
    async with serve_model_folder(
        console,
        folder,
        start_timeout=options.seconds,
        mode="disaggregated",
        prefill=1,
        decode=1,
        device=options.device,
        load_format="dummy",
        kv_memory=str(options.kv_memory),
        max_model_len=2 * options.prompt,
        max_num_seqs=64,
        pool_memory=NO_POOL,
        transport=options.transport,
    ) as cluster:
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            rng = random.Random(0)
            answers = [
                await _send_request(stub, rng, options.prompt)
                for _ in range(_WARM_UP + options.requests)
            ]
    return answers[_WARM_UP:]


async def _send_request(
    stub: generation_pb2_grpc.GenerationStub, rng: random.Random, prompt_tokens: int
) -> tuple[float, common_pb2.HandoffReport]:
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(
            ids=[rng.randrange(16, _VOCABULARY) for _ in range(prompt_tokens)]
        ),
        max_tokens=_OUTPUT_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
    first, started = None, time.perf_counter()
    async for answer in stub.Generate(request, timeout=60.0):
        if first is None and answer.token_ids:
            first = time.perf_counter()
    if first is None or not answer.timeline.handoff.transport:
        raise NodeFailed("an answer had no tokens, or no hand-off")
    return first - started, answer.timeline.handoff


def report(samples: list[tuple[float, common_pb2.HandoffReport]]) -> list[str]:
    """Lines with medians and the largest values."""
    reports = [handoff for _, handoff in samples]
    figures = {
        "time to first token, ms": [ttft * 1e3 for ttft, _ in samples],
        "forward pass, ms": [one.compute_seconds * 1e3 for one in reports],
        "exposed, ms": [one.exposed_seconds * 1e3 for one in reports],
        "commit, ms": [one.commit_seconds * 1e3 for one in reports],
        "slowed by, ms": [one.slowed_seconds * 1e3 for one in reports],
        "slowed by, % of the forward pass": [
            one.slowed_seconds / one.compute_seconds * 1e2 for one in reports
        ],
        "layers at once": [float(one.group_layers) for one in reports],
    }
    lines = [f"{len(samples)} hand-offs over {sorted({one.transport for one in reports})}"]
    lines += [
        f"{name}: median {percentile(values, 50):.2f}, largest {max(values):.2f}"
        for name, values in figures.items()
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--kv-memory", type=int, default=6 << 30)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="baton-bench-slowdown-") as scratch:
        folder = write_llama_folder(Path(scratch, "model"), LLAMA_CONFIGS[options.model])
        samples = asyncio.run(measure(folder, options, Console(stderr=True)))
    for line in report(samples):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
