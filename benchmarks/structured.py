"""`structured`: time per token under a grammar beside unconstrained requests.

A decode node runs in this process, with its real compute thread, scheduler and engine, and without
a coordinator. The same batch is decoded without grammars, with a JSON schema on every request, and
with one on a single request. The three take turns, and a ratio is the median of its rounds'.
"""

import argparse
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from baton.cluster_link.messages import LedgerReport, NodeReport, StepTokens
from baton.config.node_config import NodeConfig
from baton.structured_output.tokenizer_file import TOKENIZER_FILE
from baton.types import AttemptKey, AttemptSpec, GrammarKind, SamplingParams, StructuredOutput
from benchmarks.clusters.llama_folders import write_llama_folder
from benchmarks.cpu.shapes import SHAPES
from benchmarks.figures.report import ResultRow, make_row, print_rows
from benchmarks.steps.step_node import StepNode
from node_engine.core.step.engine import Engine
from node_engine.host.cpu_kernels import load_cpu_kernels
from node_engine.host.engine_factory import choose_sampler
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.model_loader import load_model_engine
from node_engine.structured_output.constraint_factory import ConstraintFactory
from node_engine.structured_output.grammar_state import GrammarState

HELP = "time per token under a grammar beside unconstrained requests"
# Objects without end, so that no request ends before the others.
_GRAMMAR = StructuredOutput(
    GrammarKind.JSON,
    '{"type":"array","minItems":100000,"items":{"type":"object","properties":{"name":{"type":'
    '"string"},"size":{"type":"number"},"tags":{"type":"array","items":{"enum":["red","green"]}}},'
    '"required":["name","size","tags"],"additionalProperties":false}}',
)
_PROMPT_TOKENS = 32
_SAMPLING = {
    "greedy": SamplingParams(1, temperature=0.0, ignore_eos=True),
    "top_p": SamplingParams(1, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=SHAPES, default="small", help="shape of the model (default small)"
    )
    parser.add_argument("--batch", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--tokens", type=int, default=64, help="of each output (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default 1)")


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = measure_grammars(options, command)
    print_rows(console, "structured", rows)
    return rows


class FactoryConstraints:
    """A ConstraintSource that makes constraints when they are taken."""

    def __init__(self, factory: ConstraintFactory) -> None:
        self._factory = factory

    def take_constraint(self, work: AttemptSpec) -> GrammarState | None:
        if work.request.sampling.structured_output is None:
            return None
        return self._factory.make_constraint(work)

    def drop_constraint(self, key: AttemptKey) -> None:
        """There are none that were not taken."""


def measure_grammars(options: argparse.Namespace, command: str) -> list[ResultRow]:
    rows: list[ResultRow] = []
    with start_node(options) as (node, engine, steps):
        for name, plain in _SAMPLING.items():
            sampling = replace(plain, max_tokens=options.tokens)
            found = measure_rounds(options, node, engine, steps, sampling)
            best = {kind: min(micros) for kind, micros in found.items()}
            rows += [
                make_row(f"structured/{name}/{kind}", micros, "us", command)
                for kind, micros in best.items()
            ]
            for kind in ("all", "one"):
                pairs = zip(found[kind], found["none"], strict=True)
                ratio = median(constrained / plain for constrained, plain in pairs)
                rows.append(make_row(f"structured/{name}/{kind} beside none", ratio, "x", command))
    return rows


def measure_rounds(
    options: argparse.Namespace,
    node: StepNode,
    engine: Engine,
    steps: list[int],
    sampling: SamplingParams,
) -> Mapping[str, list[float]]:
    """Microseconds of a step in each round, by which requests of the batch have a grammar."""
    constrained = replace(sampling, structured_output=_GRAMMAR)
    batches = {
        "none": [sampling] * options.batch,
        "all": [constrained] * options.batch,
        "one": [constrained] + [sampling] * (options.batch - 1),
    }
    found: dict[str, list[float]] = {kind: [] for kind in batches}
    drawn = random.Random(sampling.seed)
    for number in range(options.rounds + 1):
        for kind, params in batches.items():
            prompts = [
                tuple(drawn.choices(range(3, engine.vocab_size), k=_PROMPT_TOKENS))
                for _ in range(options.batch)
            ]
            steps.clear()
            started = time.perf_counter()
            node.run_batch(prompts, params)
            micros = (time.perf_counter() - started) / len(steps) * 1e6
            if number:  # the first round warms up
                found[kind].append(micros)
    return found


@contextmanager
def start_node(options: argparse.Namespace) -> Iterator[tuple[StepNode, Engine, list[int]]]:
    """A decode node with a grammar's tokenizer, and the sizes of its steps as they are reported."""
    steps: list[int] = []

    def count_step(report: NodeReport | LedgerReport) -> None:
        if isinstance(report, StepTokens):
            steps.append(len(report.events))

    with TemporaryDirectory(prefix="baton-bench-") as root:
        shape = SHAPES[options.model]
        # The end token must not be one that the grammar needs.
        folder = write_llama_folder(
            Path(root, "model"), shape | {"eos_token_id": shape["vocab_size"] - 1}
        )
        library = load_cpu_kernels(NodeConfig())
        engine = load_model_engine(
            folder,
            device="cpu",
            load_format="dummy",
            threads=options.threads,
            sampler=choose_sampler(),
            native=NativeOptions(library) if library is not None else None,
        )
        factory = ConstraintFactory(
            folder / TOKENIZER_FILE,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            max_grammars=1,
            clock=time.monotonic,
        )
        factory.start_tokenizer_loading()
        factory.wait_for_tokenizer()
        node = StepNode(engine, count_step, FactoryConstraints(factory))
        node.start()
        try:
            yield node, engine, steps
        finally:
            node.stop()
