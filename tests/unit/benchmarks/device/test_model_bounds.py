"""The bounds of steps and servers, against figures that were worked out by hand."""

from pathlib import Path

import pytest

from benchmarks.clusters.llama_folders import LLAMA_8B, LLAMA_TINY, write_llama_folder
from benchmarks.device.model_bounds import (
    DeviceRates,
    ModelSize,
    bound_served_row,
    list_layer_products,
)
from node_engine.model.config.model_config import ModelConfig, load_model_config

RATES = DeviceRates(read_bytes=2.973e12, products=7.23e14, to_device_bytes=5e10, to_host_bytes=5e10)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("shapes")
    return load_model_config(write_llama_folder(folder / "8b", LLAMA_8B))


@pytest.fixture(scope="module")
def size(llama_8b: ModelConfig) -> ModelSize:
    return ModelSize.from_config(llama_8b)


def test_products_of_a_layer(llama_8b: ModelConfig) -> None:
    shapes = {p.name: (p.rows, p.columns) for p in list_layer_products(llama_8b)}
    assert shapes == {
        "qkv": (6144, 4096),
        "output": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    }
    assert sum(product.elements for product in list_layer_products(llama_8b)) == 218_103_808


def test_bytes_of_weights_and_cache(size: ModelSize) -> None:
    assert size.resident_bytes == 16_060_522_496
    assert size.step_weight_bytes == size.resident_bytes - 2 * 128_256 * 4096
    assert size.kv_token_bytes == 128 << 10
    assert size.decode_bytes(32, 512) == size.step_weight_bytes + 32 * 512 * (128 << 10)


def test_tied_embeddings_are_read_as_the_head(tmp_path: Path) -> None:
    shape = LLAMA_TINY | {"tie_word_embeddings": True}
    tied = ModelSize.from_config(load_model_config(write_llama_folder(tmp_path / "tied", shape)))
    assert tied.resident_bytes == tied.step_weight_bytes


def test_fp8_halves_the_products_of_the_layers_alone(
    llama_8b: ModelConfig, size: ModelSize
) -> None:
    quantized = ModelSize.from_config(llama_8b, is_fp8=True)
    channels = 6144 + 4096 + 28672 + 4096
    saved = 32 * (218_103_808 - 4 * channels)
    assert quantized.step_weight_bytes == size.step_weight_bytes - saved


def test_small_decode_steps_are_bound_by_reading(size: ModelSize) -> None:
    assert size.decode_bound(1, 192, RATES) == size.decode_bytes(1, 192) / RATES.read_bytes


def test_large_decode_steps_may_be_bound_by_computing(size: ModelSize) -> None:
    slow = DeviceRates(RATES.read_bytes, 1e14, 1.0, 1.0)
    assert size.decode_bound(256, 512, slow) == size.decode_operations(256, 512) / 1e14
    one = 2 * (32 * 218_103_808 + 128_256 * 4096) + 4 * 32 * 4096 * 512
    assert size.decode_operations(256, 512) == 256 * one


def test_prefill_is_bound_by_computing_unless_it_is_short(size: ModelSize) -> None:
    assert size.prefill_bound(2048, RATES) == pytest.approx(41.1e-3, rel=2e-3)
    assert size.prefill_bound(16, RATES) == size.step_weight_bytes / RATES.read_bytes


@pytest.mark.parametrize(
    ("prompt", "output", "concurrency", "tokens_per_second"),
    [
        (128, 128, 1, 198),
        (128, 128, 8, 1529),
        (128, 128, 32, 5426),
        (128, 128, 64, 9431),
        (2048, 64, 1, 175),
        (2048, 64, 8, 739),
    ],
)
def test_bound_of_a_served_row(
    size: ModelSize, prompt: int, output: int, concurrency: int, tokens_per_second: float
) -> None:
    bound = bound_served_row(size, RATES, prompt, output, concurrency)
    assert bound.tokens_per_second == pytest.approx(tokens_per_second, abs=0.5)
    assert bound.ttft == size.prefill_bound(prompt, RATES)
    assert bound.tpot == size.decode_bound(concurrency, prompt + output // 2, RATES)
