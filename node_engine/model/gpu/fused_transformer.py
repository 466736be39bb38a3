"""The forward pass of the Llama families in fused kernels, for a GPU.

The same arithmetic as `node_engine/model/transformer.py:Transformer`, in nine launches a layer: the
residual is added where the next norm reads it, queries and keys are rotated where they are written.
Shapes and addresses depend on nothing but the StepShape, so that a step can be captured in a graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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

    tiles: torch.Tensor  # int32 [tiles, 4], as attend_chunks takes them
    selects_rows: bool  # the sampled rows are not all rows
    decode: SplitDecode | None  # of the first rows
    sampled: SplitDecode | None  # of the sampled rows, in the last layer; None: as of all rows


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of a step, one per token, between its attention launches."""

    residual: torch.Tensor  # [tokens, hidden], the sum of the layers so far
    query: torch.Tensor  # [tokens, heads, head_dim], of the layer that has begun
    attended: torch.Tensor  # [tokens, heads, head_dim], its result
    cos: torch.Tensor  # [tokens, head_dim]
    sin: torch.Tensor  # [tokens, head_dim], the first half negated
    slots: torch.Tensor  # int32 [tokens], block * block_size + place in the block

    def first(self, tokens: int) -> "TokenRows":
        """The first rows, in the same memory."""
        return TokenRows(
            self.residual[:tokens],
            self.query[:tokens],
            self.attended[:tokens],
            self.cos[:tokens],
            self.sin[:tokens],
            self.slots[:tokens],
        )


class LayerReplay(Protocol):
    """Captured calls of `FusedTransformer.begin_layer` for one number of tokens."""

    @property
    def rows(self) -> TokenRows: ...
    def begin_layer(self, layer: int) -> None: ...


class FusedTransformer:
    """The model's weights and arithmetic on a GPU; its only state, the KV cache, is passed in."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_model_len: int,
        *,
        upcast: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`upcast`: multiply in fp32 in attention, for Triton's interpreter.

        With `deterministic` and linear layers that are batch-invariant, what a token computes
        depends on the tokens before it alone: every query attends in the order of a prefill chunk.
        """
        self._config = config
        self._deterministic = deterministic
        self._weights = weights
        self._upcast = upcast
        self._products = choose_layer_products(weights.quantization)
        self._cos, self._sin = self._compute_angle_tables(max_model_len)

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

    @property
    def quantization(self) -> Quantization:
        return self._weights.quantization

    @property
    def num_layers(self) -> int:
        return len(self._weights.layers)

    def allocate_rows(self, tokens: int) -> TokenRows:
        """Uninitialized rows of a step of so many tokens."""
        config, embedding = self._config, self._weights.embedding
        heads = tokens, config.num_heads, config.head_dim
        return TokenRows(
            residual=embedding.new_empty(tokens, config.hidden_size),
            query=embedding.new_empty(heads),
            # Attention writes all rows but, if deterministic, those of padding.
            attended=(embedding.new_zeros if self._deterministic else embedding.new_empty)(heads),
            cos=embedding.new_empty(tokens, config.head_dim),
            sin=embedding.new_empty(tokens, config.head_dim),
            slots=torch.empty(tokens, dtype=torch.int32, device=embedding.device),
        )

    def forward(
        self,
        inputs: DeviceInputs,
        cache: PagedCache,
        on_written: OnLayerWritten | None = None,
        graphs: LayerReplay | None = None,
    ) -> torch.Tensor | None:
        """Queue a step: write its KV; returns hidden states [sampled_rows, hidden].

        After the KV of the last layer, only sampled rows are computed. Returns None if there are
        none. `graphs` replays what is captured for this number of tokens.
        """
        rows = self.allocate_rows(inputs.shape.tokens) if graphs is None else graphs.rows
        self._fill_rows(rows, inputs)
        plan = self._plan_attention(inputs)
        last = len(self._weights.layers) - 1
        for layer in range(last + 1):
            if graphs is None:
                self.begin_layer(rows, cache, layer)
            else:
                graphs.begin_layer(layer)
            if layer < last or plan.sampled is None:
                self._attend(plan, rows, cache, layer, inputs)
            if on_written is not None:  # a copy costs attention more than it does the products
                on_written(layer)
        residual, attended = rows.residual, rows.attended
        if plan.selects_rows:
            if not inputs.shape.sampled_rows:
                return None
            residual = residual.index_select(0, inputs.sampled_rows)
            attended = self._attend_sampled_rows(plan, rows, cache, inputs)
        x = self._finish_layer(self._weights.layers[last], attended, residual)
        return layer_ops.add_rms_norm(x, residual, self._weights.norm.weight, self._config.norm_eps)

    def begin_layer(self, rows: TokenRows, cache: PagedCache, layer: int) -> None:
        """Compute from the attention of the layer before to the queries of this one.

        Works on each token alone, so that a graph of it serves every step of its number of tokens.
        """
        config, layers = self._config, self._weights.layers
        x, residual = rows.residual, None
        if layer:
            x = self._finish_layer(layers[layer - 1], rows.attended, rows.residual)
            residual = rows.residual
        weights = layers[layer]
        qkv = self._products.multiply_normed(
            weights.qkv, x, residual, weights.attention_norm.weight, config.norm_eps
        )
        layer_ops.rotate_and_write_kv(
            qkv.view(len(qkv), -1, config.head_dim),
            rows.cos,
            rows.sin,
            None if weights.qk_norm is None else weights.qk_norm.weight,
            config.norm_eps,
            cache,
            layer,
            rows.slots,
            rows.query,
        )

    def _finish_layer(
        self,
        layer: LayerWeights,
        attended: torch.Tensor,  # [tokens, heads, head_dim]
        residual: torch.Tensor,  # [tokens, hidden], becomes the sum before the MLP
    ) -> torch.Tensor:  # [tokens, hidden], to be added to the residual
        products, norm = self._products, layer.mlp_norm.weight
        x = layer.output(attended.view(len(attended), -1))
        gate_up = products.multiply_normed(layer.gate_up, x, residual, norm, self._config.norm_eps)
        return products.multiply_gated(layer.down, gate_up)

    def _fill_rows(self, rows: TokenRows, inputs: DeviceInputs) -> None:
        embedding = self._weights.embedding
        torch.index_select(embedding, 0, inputs.token_ids, out=rows.residual)
        torch.index_select(self._cos, 0, inputs.positions, out=rows.cos)
        torch.index_select(self._sin, 0, inputs.positions, out=rows.sin)
        rows.slots.copy_(inputs.slots)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of hidden states [rows, hidden]."""
        return self._weights.head(hidden)

    def _plan_attention(self, inputs: DeviceInputs) -> _AttentionPlan:
        selects_rows = inputs.shape.sampled_rows != inputs.shape.tokens
        if self._deterministic:
            tiles = torch.cat((_list_decode_tiles(inputs), inputs.tiles))
            return _AttentionPlan(tiles, selects_rows, None, None)
        return _AttentionPlan(
            inputs.tiles,
            selects_rows,
            self._allocate_decode(inputs.tables, inputs.decode_starts, inputs.decode_lengths),
            self._allocate_decode(
                inputs.tables, inputs.sampled_starts, inputs.sampled_lengths, always=True
            )
            if selects_rows
            else None,
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

    def _attend(
        self,
        plan: _AttentionPlan,
        rows: TokenRows,
        cache: PagedCache,
        layer: int,
        inputs: DeviceInputs,
    ) -> None:
        window, decode_rows = self._config.windows[layer], inputs.shape.decode_rows
        query, out = rows.query, rows.attended
        if plan.decode is not None:
            plan.decode.attend(query[:decode_rows], cache, layer, window, out[:decode_rows])
        if len(plan.tiles):
            attend_chunks(
                query, cache, layer, inputs.tables, plan.tiles, window, out, upcast=self._upcast
            )

    def _attend_sampled_rows(
        self, plan: _AttentionPlan, rows: TokenRows, cache: PagedCache, inputs: DeviceInputs
    ) -> torch.Tensor:  # [sampled_rows, heads, head_dim]
        """The attention of the last layer, of the sampled rows alone."""
        if plan.sampled is None:
            return rows.attended.index_select(0, inputs.sampled_rows)
        last = self.num_layers - 1
        query = rows.query.index_select(0, inputs.sampled_rows)
        attended = query.new_empty(query.shape)
        plan.sampled.attend(query, cache, last, self._config.windows[last], attended)
        return attended


def _list_decode_tiles(inputs: DeviceInputs) -> torch.Tensor:
    """A tile of one query for each decode row, int32 [rows, 4]; of padding rows it is empty."""
    lengths = inputs.decode_lengths
    rows = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return torch.stack((inputs.decode_starts, rows, lengths - 1, lengths.clamp(max=1)), 1)
