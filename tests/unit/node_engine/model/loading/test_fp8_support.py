"""`--quantize fp8`: where it is refused, what it changes of a model's identity, and its memory."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.kv.blocks import root_hash
from baton.models.model_identity import FP8, UNQUANTIZED, Quantization
from kv_kernels.reference.fp8 import Fp8Linear
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.host.engine_factory import build_engine
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.config.model_config import load_model_config
from node_engine.model.loading import quantization_support
from node_engine.model.loading.weights import load_weights
from node_engine.model.model_loader import LoadFormat, load_model_engine
from tests.models import build_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_float32_is_refused(folder: Path, dtype: Any) -> None:
    """Also if it is the model's own dtype."""
    reason = "--quantize fp8 .* dtype is float32 here: choose --dtype bfloat16 or --quantize none"
    with pytest.raises(ConfigError, match=reason) as refused:
        load_model_engine(folder, dtype=dtype, device="cpu", quantize=FP8, emulates_fp8=True)
    assert refused.value.param == "quantize"


def test_a_node_on_a_cpu_is_refused(folder: Path) -> None:
    config = NodeConfig(model=str(folder), dtype="bfloat16", device="cpu", quantize="fp8")
    with pytest.raises(ConfigError, match=r"computes on a CPU: .*--quantize none"):
        build_engine(config, "cpu", StepLimits(max_num_seqs=4, max_batched_tokens=64))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_gpus_without_fp8_are_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    found = f"A100 has {capability[0]}.{capability[1]}: choose --quantize none"
    with pytest.raises(ConfigError, match=found):
        quantization_support.require_fp8_products(torch.device("cuda"))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_gpus_with_fp8_are_accepted(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    quantization_support.require_fp8_products(torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 72}, "hidden_size of the model is 72"),
        ({"intermediate_size": 100}, "intermediate_size of the model is 100"),
        ({"head_dim": 10}, "the width of queries of the model is 40"),
        ({"num_kv_heads": 1, "head_dim": 4}, "queries, keys and values of the model is 24"),
    ],
)
def test_widths_that_fp8_products_do_not_serve_are_named(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    config = load_model_config(folder)
    quantization_support.require_fp8_model(config, "bfloat16")
    with pytest.raises(ConfigError, match=named):
        quantization_support.require_fp8_model(replace(config, **changes), "bfloat16")


def test_identity_and_block_hashes_are_those_of_the_quantization(folder: Path) -> None:
    def load(quantize: Quantization, load_format: LoadFormat = "auto") -> BaseEngine:
        return load_model_engine(
            folder,
            dtype="bfloat16",
            device="cpu",
            quantize=quantize,
            load_format=load_format,
            emulates_fp8=True,
        )

    plain, quantized, dummy = load(UNQUANTIZED), load(FP8), load(FP8, "dummy")
    assert plain.model_identity.quantization == "none"
    assert quantized.model_identity.quantization == dummy.model_identity.quantization == "fp8"
    assert plain.layout == quantized.layout
    assert len({plain.model_digest, quantized.model_digest, dummy.model_digest}) == 3
    assert root_hash(plain.model_digest, plain.layout, b"") != root_hash(
        quantized.model_digest, quantized.layout, b""
    )


class WatchedLinear(Fp8Linear):
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

    make_fp8_linear = WatchedLinear


def test_weights_are_quantized_one_after_another(folder: Path) -> None:
    config = load_model_config(folder)
    weights = load_weights(folder, config, torch.bfloat16, CPU, WatchedKernels(), FP8)
    assert WatchedLinear.num_made == 4 * config.num_layers
    assert WatchedLinear.most_alive == 1
    assert weights.quantization == "fp8"
    assert not isinstance(weights.head, Fp8Linear)
    assert weights.embedding.dtype is torch.bfloat16
