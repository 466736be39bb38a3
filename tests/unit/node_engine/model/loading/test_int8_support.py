"""`--quantize int8`: where it is refused, and what it changes of identity, logits and memory."""

import mmap
import weakref
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.kv.blocks import root_hash
from baton.models.model_identity import FP8, INT8, UNQUANTIZED, Quantization
from benchmarks.text.text_scores import score_tokens
from kv_kernels.reference.int8_linear import Int8Linear
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.host.engine_factory import build_engine
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.config.model_config import load_model_config
from node_engine.model.loading import quantization_support
from node_engine.model.loading.weights import load_weights
from node_engine.model.model_loader import DType, LoadFormat, load_model_engine
from tests.models import build_model

CPU = torch.device("cpu")
TOKENS = [place * 7 % 512 for place in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("models"))


def load(
    folder: Path,
    quantize: Quantization,
    dtype: DType = "float32",
    load_format: LoadFormat = "auto",
) -> BaseEngine:
    return load_model_engine(
        folder,
        dtype=dtype,
        device="cpu",
        quantize=quantize,
        load_format=load_format,
        emulates_fp8=True,
    )


def test_a_gpu_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is for CPUs, .*--quantize fp8 on a GPU") as refused:
        quantization_support.check_quantization(
            INT8, load_model_config(folder), "bfloat16", torch.device("cuda"), emulates_fp8=False
        )
    assert refused.value.param == "quantize"


def test_a_width_whose_sums_could_overflow_is_named(folder: Path) -> None:
    config = load_model_config(folder)
    quantization_support.require_int8_model(config)
    with pytest.raises(ConfigError, match="intermediate_size of the model is 200000"):
        quantization_support.require_int8_model(replace(config, intermediate_size=200000))


def test_a_node_on_a_cpu_serves_it(folder: Path) -> None:
    config = NodeConfig(model=str(folder), dtype="bfloat16", device="cpu", quantize="int8")
    engine = build_engine(config, "cpu", StepLimits(max_num_seqs=4, max_batched_tokens=64))
    assert engine.model_identity.quantization == "int8"


def test_identity_and_block_hashes_are_those_of_the_quantization(folder: Path) -> None:
    engines = [
        load(folder, UNQUANTIZED, "bfloat16"),
        load(folder, FP8, "bfloat16"),
        load(folder, INT8, "bfloat16"),
        load(folder, INT8, "bfloat16", "dummy"),
    ]
    found = [engine.model_identity.quantization for engine in engines]
    assert found == ["none", "fp8", "int8", "int8"]
    assert len({engine.layout for engine in engines}) == 1
    assert len({engine.model_digest for engine in engines}) == 4
    assert len({engine.model_identity.digest for engine in engines}) == 4
    roots = {root_hash(engine.model_digest, engine.layout, b"") for engine in engines}
    assert len(roots) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_near_those_without_quantization(folder: Path, dtype: DType) -> None:
    scores = []
    for quantize in (UNQUANTIZED, INT8):
        engine = load(folder, quantize, dtype)
        engine.bind_cache(memoryview(mmap.mmap(-1, 4 * engine.layout.block_bytes)), 4)
        scores.append(torch.tensor(score_tokens(engine, TOKENS)))
    difference = (scores[1] - scores[0]).abs()
    assert 0.0 < float(difference.mean()) < 0.1


class WatchedLinear(Int8Linear):
    """Counts the unquantized weights that are still in memory when the next one is quantized."""

    unquantized: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()
    most_alive = 0
    num_made = 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        cls = WatchedLinear
        cls.unquantized.add(weight)
        cls.most_alive = max(cls.most_alive, len(cls.unquantized))
        cls.num_made += 1


class WatchedKernels(TorchKernels):
    """The reference, with watched linear layers."""

    make_int8_linear = WatchedLinear


def test_weights_are_quantized_one_after_another(folder: Path) -> None:
    config = load_model_config(folder)
    weights = load_weights(folder, config, torch.float32, CPU, WatchedKernels(), INT8)
    assert WatchedLinear.num_made == 4 * config.num_layers + 1
    assert WatchedLinear.most_alive == 1
    assert weights.quantization == "int8"
    assert isinstance(weights.head, Int8Linear)
    assert weights.embedding.dtype is torch.float32
