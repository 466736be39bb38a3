"""The forward pass of the Llama, Mistral, Qwen2 and Qwen3 families over a paged cache."""

from dataclasses import dataclass

import torch

from baton.models.model_identity import Quantization
from kv_kernels.reference.paged_attention import AttentionOp, PagedCache, SlotMapping
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import LayerCallback
from node_engine.core.step.step_batch import PromptLogprobsSpec, SampleSpec
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.rope import compute_angles, compute_inverse_frequencies
from node_engine.model.loading.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Rows of the forward pass whose next token is known and scored."""

    first_row: int
    logprobs_spec: PromptLogprobsSpec  # its targets follow the rows from `first_row` on
    slice_index: int  # of their slice in the StepBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step as tensors, one row per token: decode slices, longest first, then prefill chunks."""

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: SlotMapping  # where the KV of each row is written
    partly_filled_blocks: torch.Tensor  # int64 [n], blocks that the step starts but does not fill
    attention_by_layer: tuple[tuple[AttentionOp, ...], ...]  # of all rows
    sampled_attention: tuple[AttentionOp, ...]  # of `sampled_rows` alone, in the last layer
    # int64 [sampled], rows computed to the end: `drawn_rows`, or all rows to score a prompt or to
    # verify drafts.
    sampled_rows: torch.Tensor
    drawn_rows: torch.Tensor  # int64 [draws], rows from whose logits a token is sampled
    sample_specs: tuple[SampleSpec, ...]  # one for each of `drawn_rows`
    slice_order: tuple[int, ...]  # the slices of the StepBatch, in the order of their rows
    prompt_logprob_rows: tuple[PromptLogprobRows, ...]

    @property
    def is_all_sampled(self) -> bool:
        """Whether all rows pass through the last layer: decode slices alone, or a scored prompt."""
        return len(self.sampled_rows) == len(self.token_ids)


class Transformer:
    """The model's weights and arithmetic; its only state, the KV cache, is passed in."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kernels: TorchKernels) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._frequencies = compute_inverse_frequencies(config.rope, config.head_dim).to(
            weights.embedding.device
        )

    @property
    def quantization(self) -> Quantization:
        return self._weights.quantization

    def forward(
        self, plan: ForwardBatch, cache: PagedCache, on_layer: LayerCallback | None = None
    ) -> torch.Tensor | None:
        """Compute the step's tokens and write their KV; returns hidden states [sampled, hidden].

        After the KV of the last layer is written, only sampled rows are computed further. Returns
        None if nothing is sampled.
        """
        hidden = self._weights.embedding.index_select(0, plan.token_ids)
        cos, sin = compute_angles(self._frequencies, plan.positions, hidden.dtype)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            query = self._project_qkv(layer, index, hidden, cos, sin, plan, cache)
            if on_layer is not None:
                self._kernels.synchronize()
                on_layer(index)
            attend = plan.attention_by_layer[index]
            if index == last and not plan.is_all_sampled:
                if not len(plan.sampled_rows):
                    return None
                attend = plan.sampled_attention
                query, hidden = (
                    query.index_select(0, plan.sampled_rows),
                    hidden.index_select(0, plan.sampled_rows),
                )
            attended = query.new_empty(query.shape)
            for part in attend:
                part(query, index, attended)
            hidden = layer.output(attended.view(len(hidden), -1), hidden)
            normed = layer.mlp_norm(hidden)
            hidden = layer.down(self._kernels.silu_mul(layer.gate_up(normed)), hidden)
        return self._weights.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of hidden states [rows, hidden]."""
        return self._weights.head(hidden)

    def _project_qkv(
        self,
        layer: LayerWeights,
        index: int,
        hidden: torch.Tensor,  # [tokens, hidden]
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: ForwardBatch,
        cache: PagedCache,
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        """Compute rotated queries; write rotated keys and values to the arena."""
        config = self._config
        normed = layer.attention_norm(hidden)
        qkv = layer.qkv(normed).view(len(hidden), -1, config.head_dim)
        rotated = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            rotated.copy_(layer.qk_norm(rotated))
        self._kernels.rotary_(rotated, cos, sin)
        self._kernels.write_kv(qkv[:, config.num_heads :], cache, index, plan.slots)
        return qkv[:, : config.num_heads]
