"""Engines with bfloat16 weights that are compressed to 12 bits, and models that cannot be."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from kv_kernels.native.native_library import CpuFeature, NativeLibrary
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model
from tests.unit.kv_kernels.native.cpu_features import FEATURE_PARAMS
from tests.unit.node_engine.model.cpu.native_engines import (
    CONFIGS,
    LIBRARY,
    BoundEngine,
    make_native,
    needs_native_kernels,
    run_all,
)

pytestmark = needs_native_kernels


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_those_of_plain_weights(name: str, features: CpuFeature) -> None:
    plain, compact = (
        make_native(CONFIGS[name], "bfloat16", features=features, compact_weights=chosen)
        for chosen in (False, True)
    )
    assert run_all(compact) == run_all(plain)
    assert torch.equal(compact.read_cache().view(torch.int16), plain.read_cache().view(torch.int16))


def load_native_engine(folder: Path, *, compact_weights: bool) -> BaseEngine:
    assert isinstance(LIBRARY, NativeLibrary)
    return load_model_engine(
        folder,
        dtype="bfloat16",
        device="cpu",
        native=NativeOptions(LIBRARY, compact_weights=compact_weights),
    )


def test_model_with_too_many_exponents_keeps_plain_weights(tmp_path: Path) -> None:
    folder = build_model("llama", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    shape = tensors[name].shape
    exponents = torch.randint(-60, 0, shape, generator=torch.Generator().manual_seed(1))
    tensors[name] = torch.ldexp(torch.ones(shape), exponents).to(tensors[name].dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    plain = load_native_engine(folder, compact_weights=False)
    with capture_logs() as lines:
        found = load_native_engine(folder, compact_weights=True)
    (line,) = [line for line in lines if line["event"] == "weights are stored uncompressed"]
    assert "too many different exponents" in line["reason"]
    assert found.compute_device.packed_weight_bytes == plain.compute_device.packed_weight_bytes
    assert run_all(BoundEngine(found)) == run_all(BoundEngine(plain))
