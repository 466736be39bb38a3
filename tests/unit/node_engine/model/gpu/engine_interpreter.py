"""Runs GpuEngine on the CPU, in Triton's interpreter, and prints what it computes as JSON.

The argument is what is compared: plain or fp8.

Standard input has, for each model, its folder, prompts, and how many tokens to generate. It is a
program of its own, because TRITON_INTERPRET must be set before a kernel is defined and then holds
for the whole process.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from baton.kv.blocks import KVLayout
from baton.models.model_identity import FP8, UNQUANTIZED, Quantization
from baton.process import log
from baton.types import BlockIndex, SamplingParams
from benchmarks.text.text_scores import score_tokens
from kv_kernels.reference import linear
from kv_kernels.reference.torch_kernels import TorchKernels
from kv_kernels.triton.block_copy import copy_blocks_between
from kv_kernels.triton.fp8_linear import TritonFp8Linear
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.config.model_config import load_model_config
from node_engine.model.gpu import fused_transformer
from node_engine.model.gpu.decode_graphs import DecodeGraphs
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.gpu_engine import GpuEngine
from node_engine.model.gpu.layer_graphs import BucketedLayerGraphs
from node_engine.model.gpu.memory_profile import run_widest_steps
from node_engine.model.gpu.run_ahead import is_decode_slice
from node_engine.model.gpu.step_launcher import LaunchedStep
from node_engine.model.loading.weights import load_weights
from node_engine.model.model_engine import ModelEngine
from node_engine.model.model_loader import load_model_engine
from node_engine.model.sampling.sampler import sample_tokens
from node_engine.model.transformer import Transformer
from tests.gpu import engine_comparisons as compare
from tests.gpu.interpreter_setup import prepare_interpreter
from tests.sequence_runs import SequenceRun, ShuffledBlocks, run_step

CPU = torch.device("cpu")
MAX_MODEL_LEN = 256
# A program of a split takes milliseconds, whether it has work or not.
fused_transformer._DECODE_PROGRAMS = 8


class InterpretedKernels(TorchKernels):
    """The reference, with linear layers as a GPU has them."""

    make_linear = staticmethod(linear.PlainLinear)
    make_fp8_linear = TritonFp8Linear


def build_engine(
    folder: Path, quantization: Quantization = UNQUANTIZED, max_graph_rows: int = 0
) -> GpuEngine:
    config, kernels = load_model_config(folder), InterpretedKernels()
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, "float32")
    with torch.inference_mode():
        weights = load_weights(folder, config, torch.float32, CPU, kernels, quantization)
        model = FusedTransformer(config, weights, MAX_MODEL_LEN, upcast=True)
    return GpuEngine(
        config,
        model,
        kernels,
        layout,
        CPU,
        MAX_MODEL_LEN,
        weights.digest,
        max_graph_rows=max_graph_rows,
    )


def build_twin(folder: Path, quantization: Quantization) -> ModelEngine:
    """The engine of a CPU in fp32, which FP8 is not served in."""
    config, kernels = load_model_config(folder), TorchKernels()
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, "float32")
    with torch.inference_mode():
        weights = load_weights(folder, config, torch.float32, CPU, kernels, quantization)
        model = Transformer(config, weights, kernels)
    return ModelEngine(
        config,
        model,
        kernels,
        layout,
        CPU,
        MAX_MODEL_LEN,
        weights.digest,
        sample_tokens,
    )


def compare_fp8(folder: Path, prompt: list[int]) -> dict[str, object]:
    """Logprobs of a prompt, and tokens and logprobs of special rows, in FP8."""
    engines = {
        "fused": build_engine(folder, FP8),
        "twin": build_twin(folder, FP8),
        "unquantized": build_twin(folder, UNQUANTIZED),
    }
    results: dict[str, object] = {}
    for name, engine in engines.items():
        compare.bind_engine(engine)
        scores = score_tokens(engine, prompt)
        if isinstance(engine, GpuEngine):
            capture_layers(engine)
        tokens, logprobs = compare.run_special_rows(engine)
        results[name] = {
            "scores": scores,
            "special tokens": tokens,
            "special logprobs": logprobs,
        }
    return results


class RepeatedCall:
    """Stands in for a captured call: it calls again."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replay = call


def capture_layers(engine: GpuEngine) -> None:
    """Let the engine replay its layers in steps of up to 28 tokens."""
    assert engine._memory is not None
    graphs = BucketedLayerGraphs(engine._model, engine._memory.cache)
    with torch.inference_mode():
        graphs.capture((28, 4, 12), RepeatedCall)
    engine._bound_launcher.layer_graphs = graphs


class SlowLoads:
    """Stands in for SideCopies: a load ends when it was asked for twice, or is waited for."""

    def __init__(self) -> None:
        self.loads: list[tuple[Sequence[BlockIndex], Callable[[], None]]] = []
        self.num_queries = 0

    def load_blocks(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        blocks: torch.Tensor,
        numbers: Sequence[BlockIndex],
    ) -> None:
        self.loads.append((numbers, lambda: copy_blocks_between(host, device, blocks)))

    def find_loading_blocks(self) -> frozenset[BlockIndex]:
        self.num_queries += 1
        if self.num_queries > 1:
            self.wait_for_loads()
        return frozenset(block for numbers, _ in self.loads for block in numbers)

    def wait_for_loads(self) -> None:
        for _, copy in self.loads:
            copy()
        self.loads.clear()


def run_beside_a_load(folder: Path, prompt: list[int]) -> dict[str, object]:
    """Steps of two sequences of the same prompt; the blocks of the second one are loaded late."""
    source, engine = build_engine(folder), build_engine(folder)
    theirs, memory = compare.bind_engine(source), compare.bind_engine(engine)
    blocks = ShuffledBlocks(compare.NUM_BLOCKS)
    params = SamplingParams(1, temperature=0.0)
    first, second = (
        SequenceRun(tuple(prompt), blocks.allocate_blocks(len(prompt) + 1), params)
        for _ in range(2)
    )
    run_step(source, [second], [None])
    source.save_blocks(second.blocks).result()
    memory[:] = theirs[:]
    assert engine._memory is not None
    engine._memory._side_copies = cast(Any, SlowLoads())
    engine.load_blocks(second.blocks)
    last = SequenceSlice(
        SequenceId(2),
        tuple(prompt[-1:]),
        len(prompt) - 1,
        second.blocks,
        SampleSpec(params, 0, len(prompt)),
    )
    beside = engine.run(StepBatch((first.next_slice(), last)))
    alone = engine.run(StepBatch((last,)))
    return {
        "is_deferred": [result.is_deferred for result in (*beside, *alone)],
        "tokens": [result.token_id for result in (*beside, *alone)],
    }


def run_ahead(folder: Path, prompts: list[list[int]]) -> dict[str, object]:
    """Tokens of sequences that join and end while steps run ahead, and without graphs.

    `launches` has of each launch whether it is a decode step, and whether it runs ahead.
    """
    launches: list[tuple[bool, bool]] = []
    answers = []
    for uses_graphs in (False, True):
        engine = build_engine(folder, max_graph_rows=4 if uses_graphs else 0)
        compare.bind_engine(engine)
        if uses_graphs:
            capture_decode_steps(engine)
            capture_layers(engine)
            launch = engine._bound_launcher.launch

            def watch_launch(batch: StepBatch, **options: Any) -> LaunchedStep:
                is_decode = all(map(is_decode_slice, batch.slices))
                launches.append((is_decode, options.get("continues", False)))
                return launch(batch, **options)  # noqa: B023

            engine._bound_launcher.launch = watch_launch  # type: ignore[method-assign]
        answers.append(compare.generate_staggered(engine, prompts, growth=2))
    return {"eager": answers[0], "ahead": answers[1], "launches": launches}


def capture_decode_steps(engine: GpuEngine) -> None:
    """Let the engine replay decode steps of up to 4 sequences."""
    assert engine._memory is not None
    graphs = DecodeGraphs(engine._model, engine._memory.cache, 4 * compare.NUM_BLOCKS)
    with torch.inference_mode():
        graphs.capture((4, 1, 2), RepeatedCall)
    engine._bound_launcher.decode_graphs = graphs


def compare_all(folder: Path, prompts: list[list[int]], count: int) -> dict[str, object]:
    """Everything but the plain tokens; the last prompt is the longest.

    The engine finds that it cannot capture graphs, as on a GPU whose driver refuses it.
    """
    engine, reference = (
        build_engine(folder, max_graph_rows=4),
        load_model_engine(folder, device="cpu"),
    )
    results: dict[str, object] = {
        "handoff": compare.generate_after_handoff(engine, build_engine(folder), prompts[-1], count),
        "is_saved": compare.saves_what_it_announces(lambda: build_engine(folder), prompts[-2]),
    }
    results["run_ahead"] = run_ahead(folder, prompts[:3])
    results["load"] = run_beside_a_load(folder, prompts[-2])
    run_widest_steps(engine, StepLimits(max_num_seqs=3, max_batched_tokens=10))
    compare.bind_engine(engine)
    compare.bind_engine(reference)
    results["is_damage_reported"] = compare.reports_damaged_cache(engine)
    results["special"] = compare.run_special_rows(engine)
    results["wanted_special"] = compare.run_special_rows(reference)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None  # type: ignore[assignment]
    engine.warm_up(max_batched_tokens=4)
    results["has_graphs"] = engine._bound_launcher.decode_graphs is not None
    results["copied"] = compare.generate_in_a_copied_block(
        engine, next(prompt for prompt in prompts if len(prompt) == 16), count
    )
    return results


def main() -> None:
    prepare_interpreter()
    torch.set_num_threads(1)
    log.configure_logging("info", "json")
    results: dict[str, object] = {}
    models = json.load(sys.stdin)
    if sys.argv[1] == "fp8":
        for name, model in models.items():
            results[f"{name} fp8"] = compare_fp8(Path(model["folder"]), model["prompts"][-1])
    else:
        for name, model in models.items():
            engine = build_engine(Path(model["folder"]))
            compare.bind_engine(engine)
            capture_layers(engine)
            results[f"{name} tokens"] = compare.generate_in_chunks(
                engine, model["prompts"], model["count"]
            )
        name, model = next(iter(models.items()))
        results |= compare_all(Path(model["folder"]), model["prompts"], model["count"])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
