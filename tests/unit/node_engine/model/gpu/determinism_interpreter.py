"""Compares logits in Triton's interpreter and prints as JSON which of them differ in any bit.

Standard input has the folder of a model. It is a program of its own, because TRITON_INTERPRET must
be set before a kernel is defined and then holds for the whole process.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from pathlib import Path

import torch

from baton.kv.blocks import KVLayout
from baton.models.model_identity import FP8, UNQUANTIZED, Quantization
from kv_kernels.reference.linear import PlainLinear
from kv_kernels.reference.torch_kernels import TorchKernels
from kv_kernels.triton.batch_invariant_linear import BatchInvariantLinear
from kv_kernels.triton.fp8_linear import BatchInvariantFp8Linear
from node_engine.model.config.model_config import load_model_config
from node_engine.model.gpu import fused_transformer
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.gpu_engine import GpuEngine
from node_engine.model.loading.weights import load_weights
from tests.gpu.determinism import (
    collect_logits,
    compare_products,
    find_differences,
    run_alone,
    run_in_batch,
)
from tests.gpu.engine_comparisons import bind_engine, generate_in_chunks
from tests.gpu.interpreter_setup import make_dot_batch_invariant, prepare_interpreter
from tests.unit.node_engine.model.gpu.engine_interpreter import capture_layers

CPU = torch.device("cpu")
MAX_MODEL_LEN = 256
LENGTH = 21  # of the prompt, in tokens: more than a block
PRODUCTS = {"odd sizes": (37, 70, True), "several tiles": (96, 128, False)}
# A program of a split takes milliseconds, whether it has work or not.
fused_transformer._DECODE_PROGRAMS = 8


class PlainKernels(TorchKernels):
    """The reference, with linear layers as a GPU has them."""

    make_linear = staticmethod(PlainLinear)


class BatchInvariantKernels(TorchKernels):
    """The linear layers of `--deterministic`."""

    make_linear = BatchInvariantLinear
    make_fp8_linear = BatchInvariantFp8Linear


def build_engine(
    folder: Path, *, deterministic: bool, quantization: Quantization = UNQUANTIZED
) -> GpuEngine:
    config = load_model_config(folder)
    kernels = BatchInvariantKernels() if deterministic else PlainKernels()
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, "float32")
    with torch.inference_mode():
        weights = load_weights(folder, config, torch.float32, CPU, kernels, quantization)
        model = FusedTransformer(
            config, weights, MAX_MODEL_LEN, upcast=True, deterministic=deterministic
        )
    return GpuEngine(
        config, model, kernels, layout, CPU, MAX_MODEL_LEN, weights.digest, max_graph_rows=0
    )


def main() -> None:
    prepare_interpreter()
    make_dot_batch_invariant()
    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    folder = Path(asked["folder"])
    engine = build_engine(folder, deterministic=True)
    alone = collect_logits(engine, run_alone, LENGTH)
    results: dict[str, object] = {"different": find_differences(engine, LENGTH, alone=alone)}
    results["is padded equal"] = (
        collect_logits(engine, run_in_batch, LENGTH, prepare=capture_layers) == alone
    )
    bind_engine(engine)
    results["tokens"] = generate_in_chunks(engine, asked["prompts"], asked["count"])
    quantized = build_engine(folder, deterministic=True, quantization=FP8)
    results["different in fp8"] = find_differences(quantized, LENGTH, ["beside chunks"])
    plain = build_engine(folder, deterministic=False)
    results["different without"] = find_differences(plain, LENGTH, ["in a batch"])
    for name, (in_width, out_width, bias) in PRODUCTS.items():
        for kind in ("float32", "bfloat16"):
            results[f"product {name} {kind}"] = compare_products(
                in_width, out_width, bias, getattr(torch, kind), CPU
            )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
