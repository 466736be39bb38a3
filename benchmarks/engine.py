"""`engine`: how fast the model computes, relative to the matrix products of the same run.

The model has the shape of a 0.5B Llama with random weights, in bf16, in this process. `limit` is
the time of a step's matrix products alone, at the rate of one packed layer over weights that no
cache holds. Attention, normalisation, sampling and Python are what a step needs beyond it. Step and
products take turns, so that other load affects both.
"""

import argparse
import json
import mmap
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from baton.types import BlockIndex, SamplingParams
from benchmarks.figures.report import ResultRow, make_row, print_rows
from kv_kernels.dispatch import kernels_for
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine

HELP = "what a prefill chunk and a decode step take, against the machine's rate of matrix products"
CONTEXT = 512  # tokens
DECODE_BATCHES = (1, 8, 16)
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _VOCABULARY = 896, 4864, 24, 14, 2, 32768
_LAYER_WEIGHTS = _HIDDEN * (2 * _HIDDEN + 2 * _KV_HEADS * _HIDDEN // _HEADS + 3 * _INNER)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_PROJECTION_COPIES = 12  # of one projection: 105 MB, beyond any cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch (default 1, as when nodes share cores)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="the best of these counts (default 5)"
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = measure_engine(command, options.threads, options.rounds)
    print_rows(console, "engine", rows)
    return rows


def measure_engine(command: str, threads: int = 1, rounds: int = 5) -> list[ResultRow]:
    """Return prefill throughput, and the time of a decode step at several batch sizes."""
    with TemporaryDirectory() as folder:
        engine = _load_engine(Path(folder), threads)
    chunk = StepBatch((_make_slice(0, CONTEXT, 0),))
    seconds, bound = _measure_step(engine, chunk, rounds)
    rows = [
        make_row(
            f"engine/prefill_{CONTEXT}", CONTEXT / seconds, "tokens/s", command, CONTEXT / bound
        )
    ]
    for size in DECODE_BATCHES:
        batch = StepBatch(
            tuple(_make_slice(sequence, 1, CONTEXT - 1 - sequence) for sequence in range(size))
        )
        seconds, bound = _measure_step(engine, batch, rounds)
        rows.append(
            make_row(
                f"engine/decode_{CONTEXT}_batch_{size}", seconds * 1e3, "ms", command, bound * 1e3
            )
        )
    return rows


def _load_engine(folder: Path, threads: int) -> BaseEngine:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    engine = load_model_engine(folder, device="cpu", load_format="dummy", threads=threads)
    blocks = max(DECODE_BATCHES) * engine.layout.count_blocks(CONTEXT)
    engine.bind_cache(memoryview(mmap.mmap(-1, blocks * engine.layout.block_bytes)), blocks)
    return engine


def _make_slice(sequence: int, count: int, start: int) -> SequenceSlice:
    blocks = CONTEXT // 16
    table = [BlockIndex(n) for n in range(sequence * blocks, (sequence + 1) * blocks)]
    tokens = tuple(random.Random(sequence).choices(range(_VOCABULARY), k=count))
    return SequenceSlice(
        SequenceId(sequence), tokens, start, table, SampleSpec(_GREEDY, 0, start + count)
    )


def _measure_step(engine: BaseEngine, batch: StepBatch, rounds: int) -> tuple[float, float]:
    """Return the seconds of the step and of its matrix products at the rate of one packed layer."""
    tokens, sampled = batch.num_tokens, len(batch.slices)
    layers, last = _matrix_products(tokens), _matrix_products(sampled)
    step: list[float] = []
    per_weight: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        step.append(_timed(lambda: engine.run(batch)))
        per_weight.append((_timed(layers), _timed(last)))
    seconds, at_tokens, at_sampled = (
        min(column[1:]) for column in (step, *zip(*per_weight, strict=True))
    )
    # Except for its KV, the last layer is computed only for sampled rows, as is the output layer.
    weights = (
        _LAYER_WEIGHTS * (_LAYERS - 1 + sampled / tokens) * at_tokens
        + _HIDDEN * _VOCABULARY * at_sampled
    )
    return seconds, weights / (_PROJECTION_COPIES * _INNER * _HIDDEN)


def _matrix_products(rows: int) -> Callable[[], None]:
    linear = kernels_for(torch.device("cpu")).make_linear
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]] = [
        linear(torch.randn(_INNER, _HIDDEN, dtype=torch.bfloat16), None)
        for _ in range(_PROJECTION_COPIES)
    ]
    x = torch.randn(rows, _HIDDEN, dtype=torch.bfloat16)

    @torch.inference_mode()
    def once() -> None:
        for layer in layers:
            layer(x)

    return once


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
