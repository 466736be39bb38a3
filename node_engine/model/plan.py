"""From a step's slices to tensors: found once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_kernels.attention import Attend, Context, within_window
from kv_kernels.paged_cache import PagedCache, Slots
from kv_kernels.torch_kernels import TorchKernels
from node_engine.core.step import SampleSpec, ScoreSpec, Slice, StepBatch

Ints = npt.NDArray[np.int64]
_REACH_STEP = 1024  # the causal mask grows by this many tokens


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """`spec.targets` follow the rows from `first` on; `place` is their slice's in the batch."""

    first: int
    spec: ScoreSpec
    place: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The step's tokens flattened: decode slices first, longest context first, then prefill chunks.

    `sampled` are the rows that are computed to the end: those to draw from, or all if a prompt is to be scored.
    `draws` are the rows to draw from, `samplers` says how, and `places` which slice of the batch each answers. `scored`
    are the rows whose next token is known and scored. `attend` covers every row, by layer; `attend_sampled` the sampled
    rows alone, in the last layer. `begun` are blocks that the step starts but does not fill.
    """

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: Slots
    begun: torch.Tensor  # int64 [n]
    attend: tuple[tuple[Attend, ...], ...]
    attend_sampled: tuple[Attend, ...]
    sampled: torch.Tensor  # int64 [sampled]
    draws: torch.Tensor  # int64 [draws]
    samplers: tuple[SampleSpec, ...]
    places: tuple[int, ...]
    scored: tuple[ScoredRows, ...]

    @property
    def all_sampled(self) -> bool:
        """Every row is computed to the end, in order: a step of decode slices alone, or one that scores a prompt."""
        return len(self.sampled) == len(self.tokens)


class Planner:
    """Builds plans over one cache. `windows` has one entry per layer: how many tokens a query sees, None for all."""

    def __init__(self, kernels: TorchKernels, cache: PagedCache, windows: Sequence[int | None]) -> None:
        self._kernels = kernels
        self._cache = cache
        self._windows = windows
        self._block_size = cache.block_size
        self._dtype = cache.arena.dtype
        self._device = cache.arena.device
        self._mask = kernels.causal_mask(_REACH_STEP, self._dtype, self._device)
        self._window_masks: dict[int, torch.Tensor] = {}

    def plan(self, batch: StepBatch) -> StepPlan:
        """Raises ValueError for an empty slice or a block table that is too short."""
        contexts = [self._context(piece) for piece in batch.slices]
        order = sorted(range(len(contexts)), key=lambda i: (len(batch.slices[i].tokens) > 1, -contexts[i].length))
        pieces = [batch.slices[i] for i in order]
        tables = [contexts[i] for i in order]
        positions = [np.arange(p.start, p.start + len(p.tokens), dtype=np.int64) for p in pieces]
        ends = np.cumsum([len(p.tokens) for p in pieces])
        drawn = [i for i, piece in enumerate(pieces) if piece.sample is not None]
        scored = tuple(
            ScoredRows(int(end) - len(piece.tokens), piece.scoring, place)
            for place, piece, end in zip(order, pieces, ends, strict=True)
            if piece.scoring is not None
        )
        attend, attend_sampled = self._attention(pieces, tables, drawn, whole=bool(scored))
        draws = self._tensor(ends[drawn] - 1)
        return StepPlan(
            tokens=self._tensor(np.concatenate([np.asarray(p.tokens, dtype=np.int64) for p in pieces])),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._slots(tables, positions),
            begun=self._tensor(self._begun(pieces, tables)),
            attend=attend,
            attend_sampled=attend_sampled,
            sampled=self._tensor(np.arange(ends[-1])) if scored else draws,
            draws=draws,
            samplers=tuple(piece.sample for piece in pieces if piece.sample is not None),
            places=tuple(order[i] for i in drawn),
            scored=scored,
        )

    def _context(self, piece: Slice) -> Context:
        length = piece.start + len(piece.tokens)
        blocks = np.asarray(piece.block_table[: -(-length // self._block_size)], dtype=np.int64)
        if not piece.tokens or len(blocks) * self._block_size < length:
            raise ValueError(
                f"sequence {piece.sequence}: {len(piece.tokens)} tokens from position {piece.start} in "
                f"{len(blocks)} blocks of {self._block_size}"
            )
        return Context(blocks, length)

    def _slots(self, tables: list[Context], positions: list[Ints]) -> Slots:
        blocks = [t.blocks[p // self._block_size] for t, p in zip(tables, positions, strict=True)]
        return Slots(self._tensor(np.concatenate(blocks)), self._tensor(np.concatenate(positions) % self._block_size))

    def _begun(self, pieces: list[Slice], tables: list[Context]) -> Ints:
        """The last block of a slice, where the slice writes its first token but not its last."""
        size = self._block_size
        begun = [
            context.blocks[-1]
            for piece, context in zip(pieces, tables, strict=True)
            if context.length % size and context.length // size * size >= piece.start
        ]
        return np.asarray(begun, dtype=np.int64)

    def _attention(
        self, pieces: list[Slice], tables: list[Context], drawn: list[int], *, whole: bool
    ) -> tuple[tuple[tuple[Attend, ...], ...], tuple[Attend, ...]]:
        """Found once for each window. One that no context outgrows is none, and costs nothing."""
        longest = max(context.length for context in tables)
        windows = [window if window is not None and window < longest else None for window in self._windows]
        parts = {window: self._attend(pieces, tables, window) for window in set(windows)}
        attend = tuple(parts[window] for window in windows)
        if whole or len(drawn) == sum(len(piece.tokens) for piece in pieces):
            return attend, attend[-1]
        last = [within_window(tables[i], windows[-1], 1, self._block_size) for i in drawn]
        return attend, tuple(self._kernels.plan_decode(self._cache, last, self._dtype))

    def _attend(self, pieces: list[Slice], tables: list[Context], window: int | None) -> tuple[Attend, ...]:
        seen = tables
        if window is not None:
            seen = [
                within_window(context, window, len(piece.tokens), self._block_size)
                for piece, context in zip(pieces, tables, strict=True)
            ]
        row = sum(len(piece.tokens) == 1 for piece in pieces)
        attend = list(self._kernels.plan_decode(self._cache, seen[:row], self._dtype))
        for piece, context in zip(pieces[row:], seen[row:], strict=True):
            mask = self._causal_mask(context.length) if window is None else self._window_mask(window)
            attend.append(self._kernels.plan_prefill(self._cache, row, len(piece.tokens), context, mask))
            row += len(piece.tokens)
        return tuple(attend)

    def _causal_mask(self, reach: int) -> torch.Tensor:
        if reach > self._mask.shape[1] - self._mask.shape[0]:
            rounded = -(-reach // _REACH_STEP) * _REACH_STEP
            self._mask = self._kernels.causal_mask(rounded, self._dtype, self._device)
        return self._mask

    def _window_mask(self, window: int) -> torch.Tensor:
        if window not in self._window_masks:
            self._window_masks[window] = self._kernels.window_mask(window, self._dtype, self._device)
        return self._window_masks[window]

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
