"""ModelEngine: runs the model of a Hugging Face folder on CPUs, in the host's cache memory.

The tensors of a forward pass are built from the slices of a step once, for all layers.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.kv.blocks import KVLayout
from kv_kernels.reference.paged_attention import (
    AttentionContext,
    AttentionOp,
    PagedCache,
    SlotMapping,
    clip_to_window,
)
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import LayerCallback
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceSlice,
    SliceResult,
    StepBatch,
    gather_slice_results,
    list_sampled_rows,
)
from node_engine.model.common.base_engine import (
    TORCH_DTYPES,
    logits_by_row,
    score_prompt_rows,
    translate_device_errors,
)
from node_engine.model.common.host_memory_engine import HostMemoryEngine
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.transformer import ForwardBatch, PromptLogprobRows, Transformer

Ints = npt.NDArray[np.int64]
_MASK_GROWTH_TOKENS = 1024  # the causal mask grows by this many tokens

# Draws one token for each row of logits [rows, vocab], which it may overwrite.
Sampler = Callable[[torch.Tensor, Sequence[SampleSpec]], Sequence[SliceResult]]


class ForwardBatchBuilder:
    """Builds forward batches over one paged cache."""

    def __init__(
        self, kernels: TorchKernels, cache: PagedCache, windows: Sequence[int | None]
    ) -> None:
        """`windows`: tokens that a query attends to, per layer; None for all."""
        self._kernels = kernels
        self._cache = cache
        self._windows = windows
        self._block_size = cache.block_size
        self._dtype = cache.dtype
        self._device = cache.arena.device
        self._mask = kernels.causal_mask(_MASK_GROWTH_TOKENS, self._dtype, self._device)
        self._window_masks: dict[int, torch.Tensor] = {}

    def build_batch(self, batch: StepBatch) -> ForwardBatch:
        """Raises ValueError for an empty slice or a block table that is too short."""
        contexts = [self._context(slice_) for slice_ in batch.slices]
        order = sorted(
            range(len(contexts)),
            key=lambda i: (len(batch.slices[i].token_ids) > 1, -contexts[i].length),
        )
        slices = [batch.slices[i] for i in order]
        tables = [contexts[i] for i in order]
        positions = [np.arange(p.start, p.start + len(p.token_ids), dtype=np.int64) for p in slices]
        ends = np.cumsum([len(p.token_ids) for p in slices])
        rows, specs = list_sampled_rows(slices)
        scored = tuple(
            PromptLogprobRows(int(end) - len(slice_.token_ids), slice_.logprobs_spec, place)
            for place, slice_, end in zip(order, slices, ends, strict=True)
            if slice_.logprobs_spec is not None
        )
        # To the end are computed all rows, or the last row of slices.
        whole = bool(scored) or any(slice_.draft_specs for slice_ in slices)
        attend, attend_sampled = self._plan_attention(slices, tables, len(rows), whole=whole)
        draws = self._tensor(np.array(rows, np.int64))
        return ForwardBatch(
            token_ids=self._tensor(
                np.concatenate([np.asarray(p.token_ids, dtype=np.int64) for p in slices])
            ),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._slots(tables, positions),
            partly_filled_blocks=self._tensor(self._find_partly_filled_blocks(slices, tables)),
            attention_by_layer=attend,
            sampled_attention=attend_sampled,
            sampled_rows=self._tensor(np.arange(ends[-1])) if whole else draws,
            drawn_rows=draws,
            sample_specs=tuple(specs),
            slice_order=tuple(order),
            prompt_logprob_rows=scored,
        )

    def _context(self, slice_: SequenceSlice) -> AttentionContext:
        length = slice_.start + len(slice_.token_ids)
        blocks = np.asarray(slice_.block_table[: -(-length // self._block_size)], dtype=np.int64)
        if not slice_.token_ids or len(blocks) * self._block_size < length:
            raise ValueError(
                f"sequence {slice_.sequence_id}: {len(slice_.token_ids)} tokens from position"
                f" {slice_.start} in {len(blocks)} blocks of {self._block_size}"
            )
        return AttentionContext(blocks, length)

    def _slots(self, tables: list[AttentionContext], positions: list[Ints]) -> SlotMapping:
        blocks = [
            t.block_table[p // self._block_size] for t, p in zip(tables, positions, strict=True)
        ]
        return SlotMapping(
            self._tensor(np.concatenate(blocks)),
            self._tensor(np.concatenate(positions) % self._block_size),
        )

    def _find_partly_filled_blocks(
        self, slices: list[SequenceSlice], tables: list[AttentionContext]
    ) -> Ints:
        """The last block of each slice that writes the block's first token but not its last."""
        size = self._block_size
        begun = [
            context.block_table[-1]
            for slice_, context in zip(slices, tables, strict=True)
            if context.length % size and context.length // size * size >= slice_.start
        ]
        return np.asarray(begun, dtype=np.int64)

    def _plan_attention(
        self,
        slices: list[SequenceSlice],
        tables: list[AttentionContext],
        num_sampled_rows: int,
        *,
        whole: bool,
    ) -> tuple[tuple[tuple[AttentionOp, ...], ...], tuple[AttentionOp, ...]]:
        """Plan attention once per window. A window that is longer than all contexts is ignored."""
        longest = max(context.length for context in tables)
        windows = [
            window if window is not None and window < longest else None for window in self._windows
        ]
        parts = {
            window: self._plan_window_attention(slices, tables, window) for window in set(windows)
        }
        attend = tuple(parts[window] for window in windows)
        if whole or num_sampled_rows == sum(len(slice_.token_ids) for slice_ in slices):
            return attend, attend[-1]
        last = [
            clip_to_window(context, windows[-1], 1, self._block_size)
            for slice_, context in zip(slices, tables, strict=True)
            if slice_.sample_spec is not None
        ]
        return attend, tuple(self._kernels.plan_decode(self._cache, last, self._dtype))

    def _plan_window_attention(
        self, slices: list[SequenceSlice], tables: list[AttentionContext], window: int | None
    ) -> tuple[AttentionOp, ...]:
        seen = tables
        if window is not None:
            seen = [
                clip_to_window(context, window, len(slice_.token_ids), self._block_size)
                for slice_, context in zip(slices, tables, strict=True)
            ]
        row = sum(len(slice_.token_ids) == 1 for slice_ in slices)
        attend = list(self._kernels.plan_decode(self._cache, seen[:row], self._dtype))
        for slice_, context in zip(slices[row:], seen[row:], strict=True):
            mask = (
                self._causal_mask(context.length) if window is None else self._window_mask(window)
            )
            attend.append(
                self._kernels.plan_prefill(self._cache, row, len(slice_.token_ids), context, mask)
            )
            row += len(slice_.token_ids)
        return tuple(attend)

    def _causal_mask(self, reach: int) -> torch.Tensor:
        if reach > self._mask.shape[1] - self._mask.shape[0]:
            rounded = -(-reach // _MASK_GROWTH_TOKENS) * _MASK_GROWTH_TOKENS
            self._mask = self._kernels.causal_mask(rounded, self._dtype, self._device)
        return self._mask

    def _window_mask(self, window: int) -> torch.Tensor:
        if window not in self._window_masks:
            self._window_masks[window] = self._kernels.window_mask(
                window, self._dtype, self._device
            )
        return self._window_masks[window]

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class ModelEngine(HostMemoryEngine):
    """An `Engine` over one model and one arena. Not thread-safe: compute thread only."""

    def __init__(
        self,
        config: ModelConfig,
        model: Transformer,
        kernels: TorchKernels,
        layout: KVLayout,
        device: torch.device,
        max_model_len: int,
        digest: bytes,
        sampler: Sampler,
        dtype: str | None = None,
    ) -> None:
        """`dtype` is that of the arithmetic; None: that of the cache, which is then not int8."""
        super().__init__(
            config,
            kernels,
            layout,
            device,
            max_model_len,
            digest,
            quantization=model.quantization,
            dtype=dtype,
        )
        self._model = model
        self._sample_tokens = sampler
        self._cache: PagedCache | None = None
        self._batch_builder: ForwardBatchBuilder | None = None

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory; see Engine.bind_cache.

        Raises ValueError if it is read-only, too short or not whole blocks, ConfigError if the GPU
        cannot use it, and DeviceLost if the GPU has failed.
        """
        memory = self._wrap_host_memory(arena, num_blocks, may_be_longer=True)
        self._cache = PagedCache.from_arena(memory, TORCH_DTYPES[self._dtype])
        self._batch_builder = ForwardBatchBuilder(self._kernels, self._cache, self._config.windows)
        self._num_blocks = num_blocks

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """Run one forward pass; see Engine.run.

        Raises OutOfMemory, NodeFailed if logits are not finite, and DeviceLost if the GPU failed.
        """
        if self._cache is None or self._batch_builder is None:
            raise RuntimeError("run() before bind_cache()")
        results = [SliceResult()] * len(batch.slices)
        with torch.inference_mode(), translate_device_errors():
            if batch.block_copies:
                source, target = torch.tensor(batch.block_copies, device=self._device).unbind(1)
                self._kernels.copy_blocks(self._cache.arena, source, target)
            if not batch.slices:
                return ()
            plan = self._batch_builder.build_batch(batch)
            if len(plan.partly_filled_blocks):
                self._kernels.clear_blocks(self._cache.arena, plan.partly_filled_blocks)
            hidden = self._model.forward(plan, self._cache, on_layer)
            if hidden is not None and plan.sample_specs:
                results = self._draw_tokens(batch, plan, hidden)
            if hidden is not None and plan.prompt_logprob_rows:
                for rows in plan.prompt_logprob_rows:
                    scores = score_prompt_rows(
                        logits_by_row(self._model.compute_logits, hidden[rows.first_row :]),
                        rows.logprobs_spec,
                        self.vocab_size,
                    )
                    index = rows.slice_index
                    results[index] = results[index]._replace(prompt_logprobs=scores)
            self._kernels.synchronize()
        return tuple(results)

    def _draw_tokens(
        self,
        batch: StepBatch,
        plan: ForwardBatch,
        hidden: torch.Tensor,  # [sampled, hidden]
    ) -> list[SliceResult]:
        is_all_drawn = len(plan.drawn_rows) == len(hidden)
        drawn = hidden if is_all_drawn else hidden.index_select(0, plan.drawn_rows)
        sampled = self._sample_tokens(self._model.compute_logits(drawn), plan.sample_specs)
        ordered = [batch.slices[index] for index in plan.slice_order]
        results = [SliceResult()] * len(ordered)
        for index, result in zip(
            plan.slice_order, gather_slice_results(ordered, sampled), strict=True
        ):
            results[index] = result
        return results
