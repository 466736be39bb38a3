"""The bounds of steps and servers, against figures that were worked out by hand."""

from pathlib import Path

import pytest

from benchmarks.clusters.llama_folders import LLAMA_8B, LLAMA_TINY, write_llama_folder
from benchmarks.device.step_bounds import (
    DeviceRates,
    StepBounds,
    bound_served_row,
    list_layer_products,
)
from node_engine.model.config.model_config import ModelConfig, load_model_config

RATES = DeviceRates(read_bytes=2.973e12, products=7.23e14, to_device_bytes=5e10, to_host_bytes=5e10)
LAYERS = 32 * 218_103_808  # weights of the products of all layers
TABLE = 128_256 * 4096  # of the embedding, and of the output layer
KV_BYTES = 128 << 10  # of a token


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("shapes")
    return load_model_config(write_llama_folder(folder / "8b", LLAMA_8B))


@pytest.fixture(scope="module")
def bounds(llama_8b: ModelConfig) -> StepBounds:
    return StepBounds(llama_8b)


def test_products_of_a_layer(llama_8b: ModelConfig) -> None:
    shapes = {p.name: (p.rows, p.columns) for p in list_layer_products(llama_8b)}
    assert shapes == {
        "qkv": (6144, 4096),
        "output": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    }
    assert 32 * sum(product.elements for product in list_layer_products(llama_8b)) == LAYERS


def test_bytes_of_weights_and_cache(bounds: StepBounds, tmp_path: Path) -> None:
    assert bounds.resident_bytes == 2 * (LAYERS + 2 * TABLE)
    assert bounds.kv_token_bytes == KV_BYTES
    shape = LLAMA_8B | {"tie_word_embeddings": True}
    tied = StepBounds(load_model_config(write_llama_folder(tmp_path / "tied", shape)))
    assert tied.resident_bytes == 2 * (LAYERS + TABLE)
    tiny = load_model_config(write_llama_folder(tmp_path / "tiny", LLAMA_TINY))
    assert StepBounds(tiny, "float32").resident_bytes == 2 * StepBounds(tiny).resident_bytes


@pytest.mark.parametrize(("batch", "context"), [(1, 192), (8, 512), (64, 512)])
def test_small_decode_steps_are_bound_by_reading(
    bounds: StepBounds, batch: int, context: int
) -> None:
    """All weights but the embedding table, the context of every sequence, and the new tokens."""
    read = 2 * (LAYERS + TABLE) + batch * (context + 1) * KV_BYTES
    assert bounds.bound_decode(batch, context, RATES) == pytest.approx(read / RATES.read_bytes)


def test_large_decode_steps_may_be_bound_by_computing(bounds: StepBounds) -> None:
    slow = DeviceRates(RATES.read_bytes, 1e14, 1.0, 1.0)
    operations = 256 * (2 * (LAYERS + TABLE) + 4 * 32 * 4096 * 512)
    assert bounds.bound_decode(256, 512, slow) == pytest.approx(operations / 1e14)


def test_prefill_is_bound_by_computing_unless_it_is_short(bounds: StepBounds) -> None:
    operations = 2 * (2048 * LAYERS + TABLE) + 4 * 32 * 4096 * (2048 * 2049 // 2)
    assert bounds.bound_prefill(2048, RATES) == pytest.approx(operations / RATES.products)
    read = 2 * (LAYERS + TABLE) + 2 * 16 * KV_BYTES
    assert bounds.bound_prefill(16, RATES) == pytest.approx(read / RATES.read_bytes)


def test_fp8_reads_half_of_the_layers(llama_8b: ModelConfig) -> None:
    read = LAYERS + 2 * TABLE + 193 * KV_BYTES
    quantized = StepBounds(llama_8b, quantization="fp8")
    assert quantized.bound_decode(1, 192, RATES) == pytest.approx(read / RATES.read_bytes)


@pytest.mark.parametrize(
    ("prompt", "output", "concurrency", "tokens_per_second"),
    [
        (128, 128, 1, 198),
        (128, 128, 8, 1529),
        (128, 128, 32, 5426),
        (128, 128, 64, 9432),
        (2048, 64, 1, 175),
        (2048, 64, 8, 739),
    ],
)
def test_bound_of_a_served_row(
    bounds: StepBounds, prompt: int, output: int, concurrency: int, tokens_per_second: float
) -> None:
    bound = bound_served_row(bounds, RATES, prompt, output, concurrency)
    assert bound.tokens_per_second == pytest.approx(tokens_per_second, rel=2e-3, abs=0.5)
    assert bound.ttft == bounds.bound_prefill(prompt, RATES)
    assert bound.tpot == bounds.bound_decode(concurrency, prompt + output // 2, RATES)
