"""`--quantize int8`: where it is refused, and what it changes of identity, logits and memory.

Likewise `--kv-dtype int8`.
"""

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
from baton.types import BlockIndex
from benchmarks.text.text_scores import score_tokens
from kv_kernels.reference.int8_linear import Int8Linear
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)
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


def test_kv_on_a_gpu_is_refused(folder: Path) -> None:
    config = load_model_config(folder)
    with pytest.raises(ConfigError, match=r"--kv-dtype int8 is for CPUs") as refused:
        quantization_support.check_kv_dtype("int8", config, torch.device("cuda"))
    assert refused.value.param == "kv_dtype"
    quantization_support.check_kv_dtype("auto", config, torch.device("cuda"))


def test_heads_whose_scales_would_not_be_aligned_are_refused(folder: Path) -> None:
    config = load_model_config(folder)
    quantization_support.check_kv_dtype("int8", config, CPU)
    with pytest.raises(ConfigError, match=r"head_dim of the model is 10, .* multiple of 4"):
        quantization_support.check_kv_dtype("int8", replace(config, head_dim=10), CPU)


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


def test_layout_and_identity_are_those_of_the_kv_dtype(folder: Path) -> None:
    config = NodeConfig(model=str(folder), dtype="bfloat16", device="cpu", kv_dtype="int8")
    engine = build_engine(config, "cpu", StepLimits(max_num_seqs=4, max_batched_tokens=64))
    plain = load(folder, UNQUANTIZED, "bfloat16")
    assert engine.model_identity.dtype == plain.model_identity.dtype == "bfloat16"
    assert (engine.layout.dtype, plain.layout.dtype) == ("int8", "bfloat16")
    assert engine.layout.block_bytes * 2 * 16 == plain.layout.block_bytes * (16 + 4)
    assert engine.model_digest == plain.model_digest
    assert engine.model_identity.digest != plain.model_identity.digest
    assert root_hash(engine.model_digest, engine.layout, b"") != root_hash(
        plain.model_digest, plain.layout, b""
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moved_blocks_of_int8_kv_give_the_same_logprobs(folder: Path, dtype: DType) -> None:
    """And logprobs near those of unquantized KV."""
    engines = [
        load_model_engine(folder, dtype=dtype, device="cpu", kv_dtype="int8") for _ in range(2)
    ]
    arenas = [bytearray(4 * engine.layout.block_bytes) for engine in engines]
    for engine, arena in zip(engines, arenas, strict=True):
        engine.bind_cache(memoryview(arena), 4)
    first = score_tokens(engines[0], TOKENS)
    arenas[1][:] = arenas[0]
    slice_ = SequenceSlice(
        SequenceId(0),
        (TOKENS[38],),
        38,
        [BlockIndex(block) for block in range(3)],
        None,
        PromptLogprobsSpec((TOKENS[39],), 0),
    )
    after = [engine.run(StepBatch((slice_,)))[0].prompt_logprobs for engine in engines]
    assert after[0] == after[1]
    assert after[0][0].logprob == pytest.approx(first[-1], abs=0.1)
    plain = load(folder, UNQUANTIZED, dtype)
    plain.bind_cache(memoryview(mmap.mmap(-1, 4 * plain.layout.block_bytes)), 4)
    difference = (torch.tensor(score_tokens(plain, TOKENS)) - torch.tensor(first)).abs()
    assert 0.0 < float(difference.mean()) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_near_those_without_quantization(folder: Path, dtype: DType) -> None:
    scores = []
    for quantize in (UNQUANTIZED, INT8):
        engine = load(folder, quantize, dtype)
        engine.bind_cache(memoryview(mmap.mmap(-1, 4 * engine.layout.block_bytes)), 4)
        scores.append(torch.tensor(score_tokens(engine, TOKENS)))
    difference = (scores[1] - scores[0]).abs()
    assert 0.0 < float(difference.mean()) < 0.1


class WatchedInt8Linear(Int8Linear):
    """Counts the unquantized weights that are still in memory when the next one is quantized."""

    unquantized: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()
    most_alive = 0
    num_made = 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        cls = WatchedInt8Linear
        cls.unquantized.add(weight)
        cls.most_alive = max(cls.most_alive, len(cls.unquantized))
        cls.num_made += 1


class WatchedInt8Kernels(TorchKernels):
    """The reference, with watched linear layers."""

    make_int8_linear = WatchedInt8Linear


def test_weights_are_quantized_one_after_another(folder: Path) -> None:
    config = load_model_config(folder)
    weights = load_weights(folder, config, torch.float32, CPU, WatchedInt8Kernels(), INT8)
    assert WatchedInt8Linear.num_made == 4 * config.num_layers + 1
    assert WatchedInt8Linear.most_alive == 1
    assert weights.quantization == "int8"
    assert isinstance(weights.head, Int8Linear)
    assert weights.embedding.dtype is torch.float32
