"""The forward pass of the Llama families in fused kernels, for a GPU.

The same arithmetic as `node_engine/model/transformer.py:Transformer`, in nine launches a layer: the
residual is added where the next norm reads it, queries and keys are rotated where they are written.
Shapes and addresses depend on nothing but the StepShape, so that a step can be captured in a graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.models.model_identity import Quantization
from kv_kernels.reference.paged_attention import PagedCache
from kv_kernels.triton import layer_ops
from kv_kernels.triton.prefill_attention import attend_chunks
from kv_kernels.triton.split_decode import SplitDecode
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.rope import compute_angles, compute_inverse_frequencies
from node_engine.model.gpu.layer_products import choose_layer_products
from node_engine.model.gpu.step_inputs import DeviceInputs
from node_engine.model.loading.weights import LayerWeights, ModelWeights

# Programs of one attention launch that keep a GPU of about 130 multiprocessors busy.
_DECODE_PROGRAMS = 512
_MAX_SPLITS = 32
_ANGLE_ROWS = 1 << 16  # positions whose angles are computed at once

OnLayerWritten = Callable[
    [int], None
]  # called when the launches that write a layer's KV are queued


def choose_splits(rows: int, kv_heads: int) -> int:
    """Number of programs that share the context of one sequence and KV head.

    A power of two, because each number is compiled by itself: captured graphs have all of them.
    """
    splits = max(1, min(_MAX_SPLITS, _DECODE_PROGRAMS // max(1, rows * kv_heads)))
    return 1 << splits.bit_length() - 1


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """What the layers of one step share."""

    decode: SplitDecode | None  # of the first rows
    sampled: SplitDecode | None  # of the sampled rows, in the last layer; None: of all rows


class FusedTransformer:
    """The model's weights and arithmetic on a GPU; its only state, the KV cache, is passed in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_model_len: int,
        *,
        upcast: bool = False,
    ) -> None:
        """`upcast`: multiply in fp32 in attention, for Triton's interpreter."""
        self._config = config
        self._weights = weights
        self._upcast = upcast
        self._products = choose_layer_products(weights.quantization)
        self._cos, self._sin = self._compute_angle_tables(max_model_len)

    @property
    def quantization(self) -> Quantization:
        return self._weights.quantization

    def _compute_angle_tables(self, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of every position, both [positions, head_dim]."""
        embedding = self._weights.embedding
        frequencies = compute_inverse_frequencies(self._config.rope, self._config.head_dim)
        frequencies = frequencies.to(embedding.device)
        parts = [
            compute_angles(
                frequencies,
                torch.arange(
                    begin, min(begin + _ANGLE_ROWS, max_model_len), device=embedding.device
                ),
                embedding.dtype,
            )
            for begin in range(0, max_model_len, _ANGLE_ROWS)
        ]
        cos, sin = (torch.cat(part).squeeze(1) for part in zip(*parts, strict=True))
        return cos, sin

    def forward(
        self, inputs: DeviceInputs, cache: PagedCache, on_written: OnLayerWritten | None = None
    ) -> torch.Tensor | None:
        """Queue a step: write its KV; returns hidden states [sampled_rows, hidden].

        After the KV of the last layer, only sampled rows are computed. Returns None if there are
        none.
        """
        weights, eps, products = self._weights, self._config.norm_eps, self._products
        x = weights.embedding.index_select(0, inputs.token_ids)
        cos = self._cos.index_select(0, inputs.positions)
        sin = self._sin.index_select(0, inputs.positions)
        plan = self._plan_attention(inputs)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            qkv = products.multiply_normed(layer.qkv, x, residual, layer.attention_norm.weight, eps)
            residual = x if residual is None else residual
            query = self._rotate_qkv(layer, index, qkv, cos, sin, inputs, cache)
            if on_written is not None:
                on_written(index)
            if index == len(weights.layers) - 1 and plan.sampled is not None:
                if not inputs.shape.sampled_rows:
                    return None
                query = query.index_select(0, inputs.sampled_rows)
                residual = residual.index_select(0, inputs.sampled_rows)
                attended = self._attend_rows(plan.sampled, query, cache, index)
            else:
                attended = self._attend(plan, query, cache, index, inputs)
            x = products.multiply(layer.output, attended.view(len(attended), -1))
            gate_up = products.multiply_normed(
                layer.gate_up, x, residual, layer.mlp_norm.weight, eps
            )
            x = products.multiply_gated(layer.down, gate_up)
        return layer_ops.add_rms_norm(x, residual, weights.norm.weight, eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of hidden states [rows, hidden]."""
        return self._weights.head(hidden)

    def _plan_attention(self, inputs: DeviceInputs) -> _AttentionPlan:
        shape = inputs.shape
        is_all_sampled = shape.sampled_rows == shape.tokens
        return _AttentionPlan(
            self._allocate_decode(inputs.tables, inputs.decode_starts, inputs.decode_lengths),
            None
            if is_all_sampled
            else self._allocate_decode(
                inputs.tables, inputs.sampled_starts, inputs.sampled_lengths, always=True
            ),
        )

    def _allocate_decode(
        self,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        *,
        always: bool = False,
    ) -> SplitDecode | None:
        config = self._config
        if not len(lengths) and not always:
            return None
        return SplitDecode.allocate(
            tables,
            starts,
            lengths,
            config.num_heads,
            config.head_dim,
            choose_splits(len(lengths), config.num_kv_heads),
            upcast=self._upcast,
        )

    def _rotate_qkv(
        self,
        layer: LayerWeights,
        index: int,
        qkv: torch.Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim]
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: DeviceInputs,
        cache: PagedCache,
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        """Rotate queries; write rotated keys and values to the cache."""
        config = self._config
        qkv = qkv.view(len(qkv), -1, config.head_dim)
        layer_ops.rotate_and_write_kv(
            qkv,
            cos,
            sin,
            None if layer.qk_norm is None else layer.qk_norm.weight,
            config.norm_eps,
            cache,
            index,
            inputs.slots,
        )
        return qkv[:, : config.num_heads]

    def _attend(
        self,
        plan: _AttentionPlan,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        cache: PagedCache,
        index: int,
        inputs: DeviceInputs,
    ) -> torch.Tensor:
        out = query.new_empty(query.shape)
        window, rows = self._config.windows[index], inputs.shape.decode_rows
        if plan.decode is not None:
            plan.decode.attend(query[:rows], cache, index, window, out[:rows])
        if inputs.shape.tiles:
            attend_chunks(
                query, cache, index, inputs.tables, inputs.tiles, window, out, upcast=self._upcast
            )
        return out

    def _attend_rows(
        self, decode: SplitDecode, query: torch.Tensor, cache: PagedCache, index: int
    ) -> torch.Tensor:
        out = query.new_empty(query.shape)
        decode.attend(query, cache, index, self._config.windows[index], out)
        return out
