"""From a step's slices to tensors: found once, used by every layer."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_kernels.attention import Attend, Context
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
    are the rows whose next token is known and scored. `attend` covers every row, `attend_sampled` the sampled rows
    alone (for the last layer). `begun` are blocks that the step starts but does not fill.
    """

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: Slots
    begun: torch.Tensor  # int64 [n]
    attend: tuple[Attend, ...]
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
    """Builds plans over one cache."""

    def __init__(self, kernels: TorchKernels, cache: PagedCache) -> None:
        self._kernels = kernels
        self._cache = cache
        self._block_size = cache.block_size
        self._dtype = cache.arena.dtype
        self._device = cache.arena.device
        self._mask = kernels.causal_mask(_REACH_STEP, self._dtype, self._device)

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
    ) -> tuple[tuple[Attend, ...], tuple[Attend, ...]]:
        decoding = sum(len(piece.tokens) == 1 for piece in pieces)
        attend = list(self._kernels.plan_decode(self._cache, tables[:decoding], self._dtype))
        row = decoding
        for piece, context in zip(pieces[decoding:], tables[decoding:], strict=True):
            mask = self._causal_mask(context.length)
            attend.append(self._kernels.plan_prefill(self._cache, row, len(piece.tokens), context, mask))
            row += len(piece.tokens)
        if whole or drawn == list(range(row)):
            return tuple(attend), tuple(attend)
        sampled = self._kernels.plan_decode(self._cache, [tables[i] for i in drawn], self._dtype)
        return tuple(attend), tuple(sampled)

    def _causal_mask(self, reach: int) -> torch.Tensor:
        if reach > self._mask.shape[1] - self._mask.shape[0]:
            rounded = -(-reach // _REACH_STEP) * _REACH_STEP
            self._mask = self._kernels.causal_mask(rounded, self._dtype, self._device)
        return self._mask

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
