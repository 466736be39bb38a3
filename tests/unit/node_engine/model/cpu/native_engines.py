"""Native engines and torch engines of small models, for comparisons."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.kv.blocks import KVLayout
from baton.models.model_identity import UNQUANTIZED, Quantization
from baton.types import BlockIndex, SamplingParams
from kv_kernels.native.core_sharing import CoreSharingSlot
from kv_kernels.native.native_library import CpuFeature, NativeLibrary, load_library
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)
from node_engine.model.common.base_engine import TORCH_DTYPES, BaseEngine
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.rope import RopeConfig
from node_engine.model.cpu.native_loader import load_native_engine
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.loading.resolved_model import ResolvedModel
from node_engine.model.loading.weights import build_dummy_weights
from node_engine.model.model_engine import ModelEngine
from node_engine.model.sampling.sampler import sample_tokens
from node_engine.model.transformer import Transformer
from tests.unit.kv_kernels.native.cpu_features import ALL_FEATURES

LIBRARY = load_library()
needs_native_kernels = pytest.mark.skipif(
    not isinstance(LIBRARY, NativeLibrary), reason=f"no native kernels: {LIBRARY.describe()}"
)
BLOCK_SIZE = 16
NUM_BLOCKS = 24
CPU = torch.device("cpu")
GREEDY = SamplingParams(1, temperature=0.0, logprobs=5)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=131,
    hidden_size=72,
    intermediate_size=100,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    norm_eps=1e-5,
    max_position_embeddings=512,
    tied_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=False,
    windows=(None, None),
    rope=RopeConfig("default", 10000.0),
    stored_dtype="float32",
    eos_token_ids=(),
)
CONFIGS = {
    "odd": CONFIG,
    "qk-norm": replace(CONFIG, qk_norm=True, head_dim=16, num_kv_heads=6, qkv_bias=False),
    "windows": replace(CONFIG, windows=(20, 70), head_dim=64, num_heads=8, num_kv_heads=1),
    "tied": replace(CONFIG, tied_embeddings=True, hidden_size=130, mlp_bias=False),
}


def list_blocks(first: int, count: int) -> list[BlockIndex]:
    return [BlockIndex(block) for block in range(first, first + count)]


TABLES = [list_blocks(0, 12), list_blocks(12, 8), list_blocks(20, 4)]


class BoundEngine:
    """An engine with an arena of its own."""

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self.arena = memoryview(bytearray(engine.layout.block_bytes * NUM_BLOCKS))
        engine.bind_cache(self.arena, NUM_BLOCKS)

    def run(self, *slices: SequenceSlice) -> tuple[SliceResult, ...]:
        return self.engine.run(StepBatch(slices))

    def read_cache(self) -> torch.Tensor:
        return torch.frombuffer(self.arena, dtype=TORCH_DTYPES[self.engine.layout.dtype])


def make_layout(config: ModelConfig, dtype: str) -> KVLayout:
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)


def load_engine(
    config: ModelConfig,
    dtype: str = "float32",
    *,
    threads: int = 2,
    quantization: Quantization = UNQUANTIZED,
    kv_dtype: str = "",  # "": dtype
    features: CpuFeature = ALL_FEATURES,
    compact_weights: bool = True,
    core_sharing: CoreSharingSlot | None = None,
) -> BaseEngine:
    assert isinstance(LIBRARY, NativeLibrary)
    LIBRARY.functions.kvn_limit_cpu_features(features)
    try:
        model = ResolvedModel(
            Path(),
            config,
            make_layout(config, kv_dtype or dtype),
            dtype,
            quantization,
            CPU,
            config.max_position_embeddings,
        )
        native = NativeOptions(LIBRARY, None, compact_weights, core_sharing)
        return load_native_engine(model, native, threads, is_dummy=True)
    finally:
        LIBRARY.functions.kvn_limit_cpu_features(ALL_FEATURES)


def make_native(config: ModelConfig, dtype: str = "float32", **options: Any) -> BoundEngine:
    return BoundEngine(load_engine(config, dtype, **options))


def make_reference(
    config: ModelConfig,
    dtype: str = "float32",
    quantization: Quantization = UNQUANTIZED,
    *,
    kv_dtype: str = "",  # "": dtype
) -> BoundEngine:
    kernels = TorchKernels()
    weights = build_dummy_weights(config, TORCH_DTYPES[dtype], CPU, kernels, quantization)
    model = Transformer(config, weights, kernels)
    longest = config.max_position_embeddings
    layout = make_layout(config, kv_dtype or dtype)
    return BoundEngine(
        ModelEngine(
            config, model, kernels, layout, CPU, longest, weights.digest, sample_tokens, dtype
        )
    )


def make_slice(
    sequence: int,
    token_ids: Sequence[int],
    start: int,
    *,
    is_sampled: bool = True,
    scores: PromptLogprobsSpec | None = None,
) -> SequenceSlice:
    end = start + len(token_ids)
    spec = SampleSpec(GREEDY, 0, end) if is_sampled else None
    return SequenceSlice(
        SequenceId(sequence), tuple(token_ids), start, TABLES[sequence], spec, scores
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(0, CONFIG.vocab_size, (length,), generator=generator).tolist()
    return drawn


def list_steps() -> list[StepBatch]:
    """Prompts in chunks, decode slices between them, a slice that samples nothing, a copy."""
    a, b, c = make_prompt(70, 1), make_prompt(123, 2), make_prompt(3, 3)
    return [
        StepBatch((make_slice(0, a, 0),)),
        StepBatch((make_slice(0, [5], 70), make_slice(1, b[:20], 0, is_sampled=False))),
        StepBatch((make_slice(1, b[20:], 20), make_slice(0, [9], 71), make_slice(2, c, 0))),
        StepBatch(
            (make_slice(1, [3], 123), make_slice(0, [9], 72), make_slice(2, [7], 3)),
            block_copies=((BlockIndex(2), BlockIndex(11)),),
        ),
    ]


def run_all(bound: BoundEngine) -> list[SliceResult]:
    return [result for step in list_steps() for result in bound.engine.run(step)]


def find_largest_difference(a: Sequence[SliceResult], b: Sequence[SliceResult]) -> float:
    """The largest difference of log probabilities of tokens that both results have."""
    largest = 0.0
    for one, other in zip(a, b, strict=True):
        if one.logprobs is None or other.logprobs is None:
            assert one.logprobs is other.logprobs
            continue
        known = dict(other.logprobs.top_logprobs)
        pairs = [(value, known[t]) for t, value in one.logprobs.top_logprobs if t in known]
        assert pairs
        largest = max(largest, *(abs(value - expected) for value, expected in pairs))
    return largest
