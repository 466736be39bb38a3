"""Builds the native model of an architecture from its packed regions."""

from collections.abc import Callable, Mapping

from kv_kernels.native.model import NativeModel
from kv_kernels.native.native_library import NativeLibrary
from kv_kernels.native.structures import KvnLayer, KvnLinear, KvnModel
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.rope import compute_inverse_frequencies
from node_engine.model.cpu.native_weights import (
    EMBEDDING,
    FINAL_NORM,
    FORMATS,
    HEAD,
    WeightPlan,
    layer_region,
)


def build_native_model(
    config: ModelConfig,
    dtype: str,
    plan: WeightPlan,
    addresses: Mapping[str, int],  # of the filled regions, by name
    memory: object,  # what has to stay alive for them
    library: NativeLibrary,
    threads: int,
) -> NativeModel:
    """Raises MemoryError if there is no memory or no thread left."""
    frequencies = compute_inverse_frequencies(config.rope, config.head_dim).numpy()

    def matrix(name: str) -> KvnLinear:
        return plan.matrices[name].describe(addresses[name])

    layers = [
        _describe_layer(index, window or 0, addresses, matrix)
        for index, window in enumerate(config.windows)
    ]
    model = KvnModel(
        format=FORMATS[dtype],
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        norm_eps=config.norm_eps,
        frequencies=frequencies.ctypes.data,
        embedding=addresses[EMBEDDING],
        final_norm=addresses[FINAL_NORM],
        head=matrix(HEAD),
    )
    return NativeModel(library.functions, model, layers, threads, [frequencies, memory])


def _describe_layer(
    index: int, window: int, addresses: Mapping[str, int], matrix: Callable[[str], KvnLinear]
) -> KvnLayer:
    return KvnLayer(
        attention_norm=addresses[layer_region(index, "attention_norm")],
        qk_norm=addresses.get(layer_region(index, "qk_norm")),
        mlp_norm=addresses[layer_region(index, "mlp_norm")],
        qkv=matrix(layer_region(index, "qkv")),
        output=matrix(layer_region(index, "output")),
        gate_up=matrix(layer_region(index, "gate_up")),
        down=matrix(layer_region(index, "down")),
        window=window,
    )
