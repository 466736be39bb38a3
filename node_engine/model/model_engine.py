"""ModelEngine: runs the model of a Hugging Face folder as the engine of a node.

The tensors of a forward pass are built from the slices of a step once, for all layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import ConfigError, OutOfMemory
from baton.kv.blocks import KVLayout
from baton.models.model_identity import NATIVE_IMPLEMENTATION, UNQUANTIZED, ModelIdentity
from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from baton.types import TokenLogprobs
from kv_kernels.reference.host_memory import MemoryPinError
from kv_kernels.reference.paged_attention import (
    AttentionContext,
    AttentionOp,
    PagedCache,
    SlotMapping,
    clip_to_window,
)
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import DeviceLost, LayerCallback
from node_engine.core.step.step_batch import SampleSpec, SequenceSlice, SliceResult, StepBatch
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.sampling.logprobs import compute_logprobs, compute_rows_at_once
from node_engine.model.transformer import ForwardBatch, PromptLogprobRows, Transformer
from node_engine.model.warm_up import CPU_PROMPT_LENGTHS, GPU_PROMPT_LENGTHS, iter_warm_up_steps

Ints = npt.NDArray[np.int64]
_MASK_GROWTH_TOKENS = 1024  # the causal mask grows by this many tokens

# Draws one token for each row of logits [rows, vocab], which it may overwrite.
Sampler = Callable[[torch.Tensor, Sequence[SampleSpec]], Sequence[SliceResult]]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        self._dtype = cache.arena.dtype
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
        drawn = [i for i, slice_ in enumerate(slices) if slice_.sample_spec is not None]
        scored = tuple(
            PromptLogprobRows(int(end) - len(slice_.token_ids), slice_.logprobs_spec, place)
            for place, slice_, end in zip(order, slices, ends, strict=True)
            if slice_.logprobs_spec is not None
        )
        attend, attend_sampled = self._plan_attention(slices, tables, drawn, whole=bool(scored))
        draws = self._tensor(ends[drawn] - 1)
        return ForwardBatch(
            token_ids=self._tensor(
                np.concatenate([np.asarray(p.token_ids, dtype=np.int64) for p in slices])
            ),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._slots(tables, positions),
            partly_filled_blocks=self._tensor(self._find_partly_filled_blocks(slices, tables)),
            attention_by_layer=attend,
            sampled_attention=attend_sampled,
            sampled_rows=self._tensor(np.arange(ends[-1])) if scored else draws,
            drawn_rows=draws,
            sample_specs=tuple(
                slice_.sample_spec for slice_ in slices if slice_.sample_spec is not None
            ),
            drawn_slice_indices=tuple(order[i] for i in drawn),
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
        drawn: list[int],
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
        if whole or len(drawn) == sum(len(slice_.token_ids) for slice_ in slices):
            return attend, attend[-1]
        last = [clip_to_window(tables[i], windows[-1], 1, self._block_size) for i in drawn]
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


class ModelEngine:
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
    ) -> None:
        self._config = config
        self._model = model
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._max_model_len = max_model_len
        self._digest = digest
        self._sample_tokens = sampler
        self._cache: PagedCache | None = None
        self._batch_builder: ForwardBatchBuilder | None = None
        self._num_blocks = 0

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._config.eos_token_ids

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def model_digest(self) -> bytes:
        return self._digest

    @property
    def model_identity(self) -> ModelIdentity:
        config, dtype = self._config, self._layout.dtype
        digest = self._digest.hex()
        return ModelIdentity(
            NATIVE_IMPLEMENTATION,
            digest,
            dtype,
            UNQUANTIZED,
            self._layout,
            config.vocab_size,
            config.eos_token_ids,
        )

    @property
    def device(self) -> str:
        """The resolved device, for logs."""
        return self._device.type

    @property
    def can_read_pool_in_place(self) -> bool:
        """False on a GPU: only the arena itself is pinned and mapped there."""
        return self._device.type == "cpu"

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory; see Engine.bind_cache.

        Raises ValueError if it is read-only, too short or not whole blocks, ConfigError if the GPU
        cannot use it, and DeviceLost if the GPU has failed.
        """
        layout = self._layout
        reach, rest = divmod(arena.nbytes, layout.block_bytes)
        if (
            arena.readonly
            or rest
            or reach < num_blocks
            or (reach > num_blocks and not self.can_read_pool_in_place)
        ):
            raise ValueError(
                f"arena of {arena.nbytes} bytes (read-only: {arena.readonly}): {num_blocks} blocks"
                f" need {num_blocks * layout.block_bytes} writable bytes"
            )
        shape = (
            reach,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        try:
            with _translate_device_errors():
                memory = self._kernels.memory_as_tensor(arena, TORCH_DTYPES[layout.dtype])
        except MemoryPinError as error:
            raise ConfigError(
                f"the GPU cannot use the cache memory: {error}: its folder has to be of a tmpfs"
                f" like {DEFAULT_SEGMENT_FOLDER}: choose one with --segment-dir; or allow the"
                " process more locked memory (ulimit -l)"
            ) from error
        self._cache = PagedCache.from_arena(memory.view(shape))
        self._batch_builder = ForwardBatchBuilder(self._kernels, self._cache, self._config.windows)
        self._num_blocks = num_blocks

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run steps of typical sizes in the empty cache; see Engine.warm_up."""
        prompts = CPU_PROMPT_LENGTHS if self._device.type == "cpu" else GPU_PROMPT_LENGTHS
        cache = self._layout.block_size, self._num_blocks
        for step in iter_warm_up_steps(prompts, *cache, self._max_model_len, max_batched_tokens):
            if not is_wanted():
                return
            self.run(step)

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """Run one forward pass; see Engine.run.

        Raises OutOfMemory, NodeFailed if logits are not finite, and DeviceLost if the GPU failed.
        """
        if self._cache is None or self._batch_builder is None:
            raise RuntimeError("run() before bind_cache()")
        results = [SliceResult()] * len(batch.slices)
        with torch.inference_mode(), _translate_device_errors():
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
                drawn = (
                    hidden.index_select(0, plan.drawn_rows) if plan.prompt_logprob_rows else hidden
                )
                for index, result in zip(
                    plan.drawn_slice_indices,
                    self._sample_tokens(self._model.compute_logits(drawn), plan.sample_specs),
                    strict=True,
                ):
                    results[index] = result
            if hidden is not None and plan.prompt_logprob_rows:
                self._compute_prompt_logprobs(hidden, plan, results)
            self._kernels.synchronize()
        return tuple(results)

    def _compute_prompt_logprobs(
        self, hidden: torch.Tensor, plan: ForwardBatch, results: list[SliceResult]
    ) -> None:  # hidden [tokens, hidden]
        """Score prompt tokens, a bounded number of rows at a time, to bound memory."""
        for rows in plan.prompt_logprob_rows:
            targets = rows.logprobs_spec.target_token_ids
            rows_at_once = compute_rows_at_once(self.vocab_size)
            found: list[TokenLogprobs] = []
            for begin in range(0, len(targets), rows_at_once):
                chunk = targets[begin : begin + rows_at_once]
                logits = self._model.compute_logits(hidden[rows.first_row + begin :][: len(chunk)])
                found += compute_logprobs(
                    logits.float(), chunk, [rows.logprobs_spec.top_logprobs] * len(chunk)
                )
            results[rows.slice_index] = results[rows.slice_index]._replace(
                prompt_logprobs=tuple(found)
            )


@contextmanager
def _translate_device_errors() -> Iterator[None]:
    """Translate torch's errors: memory exhausted to OutOfMemory, a failed GPU to DeviceLost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the device has no memory left for this step: {error}: lower --max-batched-tokens"
        ) from error
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error)) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"no memory left for this step: {error}: lower --max-batched-tokens"
        ) from error
