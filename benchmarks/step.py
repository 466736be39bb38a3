"""`step`: what a decode step costs outside of the forward pass, by part.

A decode node runs in this process, with its real compute thread, scheduler, role and engine, and
without a coordinator. Each part is the time of its functions without that of the parts inside it;
`between` is the rest. The figures are the smallest of several rounds, in microseconds for each
step. `forward` is the model itself. `encode` and `decode` are what the node's and the coordinator's
event loop do with the report of a step.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from baton.cluster_link.messages import LedgerReport, NodeReport, StepTokens
from baton.cluster_link.report_codec import decode_report, encode_report
from baton.cluster_link.stream import decode_checked, encode_checked
from baton.pb import cluster_pb2
from baton.types import Incarnation, SamplingParams
from benchmarks.figures.report import ResultRow, make_row, print_rows
from benchmarks.steps.part_times import PartTimes
from benchmarks.steps.step_node import StepNode
from node_engine.host.engine_factory import choose_sampler
from node_engine.model.model_engine import ModelEngine
from node_engine.model.model_loader import load_model_engine

HELP = "what a decode step costs outside of the forward pass, by part"
BATCHES = (1, 4, 16)
SAMPLING = {
    "greedy": SamplingParams(1, temperature=0.0, ignore_eos=True),
    "top_p": SamplingParams(1, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),
}
_PROMPT_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=128, help="of each output (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="the best counts (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument(
        "--vocabulary", type=int, default=8192, help="token ids of the model (default 8192)"
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = measure_step_parts(options, command)
    print_rows(console, "step", rows)
    return rows


def measure_step_parts(options: argparse.Namespace, command: str) -> list[ResultRow]:
    with TemporaryDirectory() as folder:
        engine = _load_engine(Path(folder), options.vocabulary, options.threads)
    parts = PartTimes()
    reports: list[StepTokens] = []

    def keep(report: NodeReport | LedgerReport) -> None:
        if isinstance(report, StepTokens):
            reports.append(report)

    node = StepNode(engine, keep)
    _wrap_parts(parts, node, engine)
    node.start()
    rows: list[ResultRow] = []
    try:
        for name, params in SAMPLING.items():
            sampling = replace(params, max_tokens=options.tokens)
            for batch in BATCHES:
                rounds = []
                for number in range(options.rounds + 1):
                    prompts = _make_prompts(batch, options.vocabulary, number)
                    parts.reset()
                    reports.clear()
                    started = time.perf_counter()
                    node.run_requests(prompts, sampling)
                    seconds = time.perf_counter() - started
                    rounds.append(_per_step(parts, reports, seconds))
                best = {part: min(figures[part] for figures in rounds[1:]) for part in rounds[-1]}
                rows += [
                    make_row(f"step/{name}_{batch}/{part}", micros, "us", command)
                    for part, micros in best.items()
                ]
    finally:
        node.stop()
    return rows


def _per_step(parts: PartTimes, reports: list[StepTokens], seconds: float) -> dict[str, float]:
    """Microseconds of each part for each step, and of the link's codec for each report."""
    steps = len(reports)
    figures = {part: micros / steps * 1e6 for part, micros in sorted(parts.seconds.items())}
    figures["between"] = (seconds - sum(parts.seconds.values())) / steps * 1e6
    figures["outside forward"] = seconds / steps * 1e6 - figures["forward"]
    figures["whole"] = seconds / steps * 1e6
    return figures | _measure_link(reports)


def _measure_link(reports: list[StepTokens]) -> dict[str, float]:
    started = time.perf_counter()
    messages = [encode_checked(encode_report(report, Incarnation("bench"))) for report in reports]
    encoded = time.perf_counter()
    for data in messages:
        message = decode_checked(cluster_pb2.NodeMessage, data)
        assert message is not None
        decode_report(message)
    decoded = time.perf_counter()
    return {
        "encode": (encoded - started) / len(reports) * 1e6,
        "decode": (decoded - encoded) / len(reports) * 1e6,
    }


def _wrap_parts(parts: PartTimes, node: StepNode, engine: ModelEngine) -> None:
    thread: Any = node.compute_thread
    model: Any = engine
    parts.wrap_method(node.inbox, "drain", "inbox")
    parts.wrap_method(thread, "_handle_inbox", "load snapshot")
    parts.wrap_method(thread, "_report_cache_changes", "cache events")
    parts.wrap_method(thread, "_charge_device_time", "counters")
    parts.wrap_method(thread, "_run_step", "counters")
    parts.wrap_method(node.scheduler, "schedule_step", "schedule")
    parts.wrap_method(node.scheduler, "update_from_results", "update")
    parts.wrap_method(node.scheduler.prefill_budget, "observe_step", "counters")
    parts.wrap_method(node.role, "before_step", "deliver")
    parts.wrap_method(node.role, "after_step", "deliver")
    parts.wrap_method(model, "run", "engine rest")
    parts.wrap_method(model._batch_builder, "build_batch", "build batch")
    parts.wrap_method(model._model, "forward", "forward")
    parts.wrap_method(model._model, "compute_logits", "forward")
    parts.wrap_method(model, "_sample_tokens", "sample")


def _load_engine(folder: Path, vocabulary: int, threads: int) -> ModelEngine:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    engine = load_model_engine(
        folder, device="cpu", load_format="dummy", threads=threads, sampler=choose_sampler()
    )
    assert isinstance(engine, ModelEngine)
    return engine


def _make_prompts(batch: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [tuple(source.choices(range(3, vocabulary), k=_PROMPT_TOKENS)) for _ in range(batch)]
