"""From a step's slices to tensors: found once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_kernels.reference.attention import AttentionContext, AttentionOp, clip_to_window
from kv_kernels.reference.paged_cache import PagedCache, SlotMapping
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceSlice,
    StepBatch,
)

Ints = npt.NDArray[np.int64]
_MASK_GROWTH_TOKENS = 1024  # the causal mask grows by this many tokens


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """`spec.targets` follow the rows from `first_row` on; `slice_index` is their slice's in the
    batch."""

    first_row: int
    logprobs_spec: PromptLogprobsSpec
    slice_index: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The step's tokens flattened: decode slices first, longest context first, then prefill chunks.

    `sampled_rows` are the rows that are computed to the end: those to draw from, or all if a prompt
    is to be scored. `drawn_rows` are the rows to draw from, `sample_specs` says how, and
    `drawn_slice_indices` which slice of the batch each answers. `prompt_logprob_rows` are the rows
    whose next token is known and scored. `attention_by_layer` covers every row, by layer;
    `sampled_attention` the sampled rows alone, in the last layer. `partly_filled_blocks` are blocks
    that the step starts but does not fill.
    """

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: SlotMapping
    partly_filled_blocks: torch.Tensor  # int64 [n]
    attention_by_layer: tuple[tuple[AttentionOp, ...], ...]
    sampled_attention: tuple[AttentionOp, ...]
    sampled_rows: torch.Tensor  # int64 [sampled]
    drawn_rows: torch.Tensor  # int64 [draws]
    sample_specs: tuple[SampleSpec, ...]
    drawn_slice_indices: tuple[int, ...]
    prompt_logprob_rows: tuple[PromptLogprobRows, ...]

    @property
    def is_all_sampled(self) -> bool:
        """Every row is computed to the end, in order: a step of decode slices alone, or one that
        scores a prompt."""
        return len(self.sampled_rows) == len(self.token_ids)


class ForwardBatchBuilder:
    """Builds plans over one cache. `windows` has one entry per layer: how many tokens a query sees,
    None for all."""

    def __init__(
        self, kernels: TorchKernels, cache: PagedCache, windows: Sequence[int | None]
    ) -> None:
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
        contexts = [self._context(piece) for piece in batch.slices]
        order = sorted(
            range(len(contexts)),
            key=lambda i: (len(batch.slices[i].token_ids) > 1, -contexts[i].length),
        )
        pieces = [batch.slices[i] for i in order]
        tables = [contexts[i] for i in order]
        positions = [np.arange(p.start, p.start + len(p.token_ids), dtype=np.int64) for p in pieces]
        ends = np.cumsum([len(p.token_ids) for p in pieces])
        drawn = [i for i, piece in enumerate(pieces) if piece.sample_spec is not None]
        scored = tuple(
            PromptLogprobRows(int(end) - len(piece.token_ids), piece.logprobs_spec, place)
            for place, piece, end in zip(order, pieces, ends, strict=True)
            if piece.logprobs_spec is not None
        )
        attend, attend_sampled = self._plan_attention(pieces, tables, drawn, whole=bool(scored))
        draws = self._tensor(ends[drawn] - 1)
        return ForwardBatch(
            token_ids=self._tensor(
                np.concatenate([np.asarray(p.token_ids, dtype=np.int64) for p in pieces])
            ),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._slots(tables, positions),
            partly_filled_blocks=self._tensor(self._find_partly_filled_blocks(pieces, tables)),
            attention_by_layer=attend,
            sampled_attention=attend_sampled,
            sampled_rows=self._tensor(np.arange(ends[-1])) if scored else draws,
            drawn_rows=draws,
            sample_specs=tuple(
                piece.sample_spec for piece in pieces if piece.sample_spec is not None
            ),
            drawn_slice_indices=tuple(order[i] for i in drawn),
            prompt_logprob_rows=scored,
        )

    def _context(self, piece: SequenceSlice) -> AttentionContext:
        length = piece.start + len(piece.token_ids)
        blocks = np.asarray(piece.block_table[: -(-length // self._block_size)], dtype=np.int64)
        if not piece.token_ids or len(blocks) * self._block_size < length:
            raise ValueError(
                f"sequence {piece.sequence_id}: {len(piece.token_ids)} tokens from position {piece.start} in "
                f"{len(blocks)} blocks of {self._block_size}"
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
        self, pieces: list[SequenceSlice], tables: list[AttentionContext]
    ) -> Ints:
        """The last block of a slice, where the slice writes its first token but not its last."""
        size = self._block_size
        begun = [
            context.block_table[-1]
            for piece, context in zip(pieces, tables, strict=True)
            if context.length % size and context.length // size * size >= piece.start
        ]
        return np.asarray(begun, dtype=np.int64)

    def _plan_attention(
        self,
        pieces: list[SequenceSlice],
        tables: list[AttentionContext],
        drawn: list[int],
        *,
        whole: bool,
    ) -> tuple[tuple[tuple[AttentionOp, ...], ...], tuple[AttentionOp, ...]]:
        """Found once for each window. One that no context outgrows is none, and costs nothing."""
        longest = max(context.length for context in tables)
        windows = [
            window if window is not None and window < longest else None for window in self._windows
        ]
        parts = {
            window: self._plan_window_attention(pieces, tables, window) for window in set(windows)
        }
        attend = tuple(parts[window] for window in windows)
        if whole or len(drawn) == sum(len(piece.token_ids) for piece in pieces):
            return attend, attend[-1]
        last = [clip_to_window(tables[i], windows[-1], 1, self._block_size) for i in drawn]
        return attend, tuple(self._kernels.plan_decode(self._cache, last, self._dtype))

    def _plan_window_attention(
        self, pieces: list[SequenceSlice], tables: list[AttentionContext], window: int | None
    ) -> tuple[AttentionOp, ...]:
        seen = tables
        if window is not None:
            seen = [
                clip_to_window(context, window, len(piece.token_ids), self._block_size)
                for piece, context in zip(pieces, tables, strict=True)
            ]
        row = sum(len(piece.token_ids) == 1 for piece in pieces)
        attend = list(self._kernels.plan_decode(self._cache, seen[:row], self._dtype))
        for piece, context in zip(pieces[row:], seen[row:], strict=True):
            mask = (
                self._causal_mask(context.length) if window is None else self._window_mask(window)
            )
            attend.append(
                self._kernels.plan_prefill(self._cache, row, len(piece.token_ids), context, mask)
            )
            row += len(piece.token_ids)
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
