"""Weights for the native kernels: a plan of regions, packed from a checkpoint's tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from baton.models.model_identity import INT8, Quantization
from kv_kernels.native.matrix import MatrixLayout
from kv_kernels.native.native_library import NativeLibrary, describe_features
from kv_kernels.native.structures import PACKED_FORMAT_VERSION, Format
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.loading.model_tensors import EMBEDDING_TENSOR, TensorSource
from node_engine.model.loading.packed_weights.image_layout import PackedWeightsKey

FORMATS = {"float32": Format.FLOAT32, "bfloat16": Format.BFLOAT16}
EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"


@dataclass(frozen=True, slots=True)
class Region:
    """One array of the packed model."""

    name: str
    nbytes: int
    fill: Callable[[memoryview, TensorSource], None]  # packs tensors into `nbytes` zeros


def layer_region(layer: int, name: str) -> str:
    """The name of a layer's region."""
    return f"layers.{layer}.{name}"


class WeightPlan:
    """The regions of a model, and how each is filled."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        quantization: Quantization,
        library: NativeLibrary,
        *,
        is_compact: bool = False,
    ) -> None:
        """`is_compact`: matrices in bfloat16 are stored as COMPACT_BFLOAT16.

        To fill a region then raises IncompressibleWeightsError if that cannot be done exactly.
        """
        self.dtype, self.quantization = dtype, quantization
        self._config = config
        self._functions, self._features = library.functions, library.features
        self._format = FORMATS[dtype]
        self._matrix_format = Format.INT8 if quantization == INT8 else self._format
        self.is_compact = is_compact and self._matrix_format is Format.BFLOAT16
        if self.is_compact:
            self._matrix_format = Format.COMPACT_BFLOAT16
        self.matrices: Mapping[str, MatrixLayout] = dict(self._iter_matrices())
        self.regions: tuple[Region, ...] = tuple(self._iter_regions())

    def make_key(self, model_digest: bytes) -> PackedWeightsKey:
        """What tells an image of these weights from all others."""
        return PackedWeightsKey(
            model_digest=model_digest.hex(),
            format_name="native-compact" if self.is_compact else "native",
            format_version=PACKED_FORMAT_VERSION,
            cpu_features=describe_features(self._features),
            dtype=self.dtype,
            quantization=self.quantization,
        )

    def _iter_matrices(self) -> Iterator[tuple[str, MatrixLayout]]:
        config, stored = self._config, self._matrix_format
        hidden, inner, attended = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads * config.head_dim,
        )
        channels = attended + 2 * config.num_kv_heads * config.head_dim
        for layer in range(config.num_layers):
            for name, layout in (
                ("qkv", MatrixLayout(hidden, channels, stored, has_bias=config.qkv_bias)),
                ("output", MatrixLayout(attended, hidden, stored, has_bias=config.output_bias)),
                (
                    "gate_up",
                    MatrixLayout(hidden, inner, stored, is_gated=True, has_bias=config.mlp_bias),
                ),
                ("down", MatrixLayout(inner, hidden, stored, has_bias=config.mlp_bias)),
            ):
                yield layer_region(layer, name), layout
        yield HEAD, MatrixLayout(hidden, config.vocab_size, stored)

    def _iter_regions(self) -> Iterator[Region]:
        config = self._config
        hidden = config.hidden_size
        element = 4 if self._format is Format.FLOAT32 else 2
        yield Region(EMBEDDING, config.vocab_size * hidden * element, _copy_embedding)
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            yield _norm_region(layer, "attention_norm", f"{prefix}input_layernorm.weight", hidden)
            yield self._matrix_region(
                layer, "qkv", [[f"{attention}{name}_proj" for name in ("q", "k", "v")]]
            )
            if config.qk_norm:
                yield self._qk_norm_region(layer, attention)
            yield self._matrix_region(layer, "output", [[f"{attention}o_proj"]])
            yield _norm_region(
                layer, "mlp_norm", f"{prefix}post_attention_layernorm.weight", hidden
            )
            yield self._matrix_region(layer, "gate_up", [[f"{mlp}gate_proj"], [f"{mlp}up_proj"]])
            yield self._matrix_region(layer, "down", [[f"{mlp}down_proj"]])
        yield Region(
            FINAL_NORM, hidden * 4, lambda view, source: _store(view, [source("model.norm.weight")])
        )
        name = EMBEDDING_TENSOR if config.tied_embeddings else "lm_head.weight"
        layout = self.matrices[HEAD]
        yield Region(
            HEAD,
            layout.nbytes,
            lambda view, source: layout.pack(self._functions, view, [source(name)]),
        )

    def _matrix_region(self, layer: int, name: str, parts: list[list[str]]) -> Region:
        """`parts`: the matrices whose panels take turns, each as tensors that are joined."""
        region = layer_region(layer, name)
        layout = self.matrices[region]

        def pack_matrix(view: memoryview, source: TensorSource) -> None:
            weights = [_join(source, part, "weight") for part in parts]
            biases = [_join(source, part, "bias") for part in parts] if layout.has_bias else []
            layout.pack(self._functions, view, weights, biases)

        return Region(region, layout.nbytes, pack_matrix)

    def _qk_norm_region(self, layer: int, prefix: str) -> Region:
        """One row of weights for each head of queries and keys."""
        config = self._config

        def store_norms(view: memoryview, source: TensorSource) -> None:
            query, key = source(f"{prefix}q_norm.weight"), source(f"{prefix}k_norm.weight")
            _store(view, [query] * config.num_heads + [key] * config.num_kv_heads)

        heads = config.num_heads + config.num_kv_heads
        return Region(layer_region(layer, "qk_norm"), heads * config.head_dim * 4, store_norms)


def _norm_region(layer: int, name: str, tensor: str, width: int) -> Region:
    return Region(
        layer_region(layer, name), width * 4, lambda view, source: _store(view, [source(tensor)])
    )


def _join(source: TensorSource, names: list[str], kind: str) -> torch.Tensor:
    found = [source(f"{name}.{kind}") for name in names]
    return found[0] if len(found) == 1 else torch.cat(found)


def _store(view: memoryview, tensors: list[torch.Tensor]) -> None:
    """Write tensors one after the other, in float32."""
    np.frombuffer(view, np.float32)[:] = torch.cat(tensors).float().numpy()


def _copy_embedding(view: memoryview, source: TensorSource) -> None:
    table = source(EMBEDDING_TENSOR).contiguous()
    np.frombuffer(view, np.uint8)[:] = table.view(torch.uint8).numpy().reshape(-1)
