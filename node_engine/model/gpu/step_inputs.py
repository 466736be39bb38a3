"""The inputs of a step on a GPU: everything that kernels read, packed into one array of words.

One array means one copy from the host. Its parts have fixed places for a given StepShape, so that
a captured graph finds them again; the block tables follow at the end, one after another.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.types import BlockIndex
from kv_kernels.triton.prefill_attention import PrefillChunk, list_query_tiles
from kv_kernels.triton.sampling import SamplingRows
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)

Words = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]
_MAX_CACHED_TABLES = 4  # block tables for each slice of a step, of sequences that have ended
_SEED_MASK = (1 << 64) - 1
_ALIGNED_WORDS = 4  # 16 bytes: Triton compiles a kernel anew for each pattern of unaligned pointers
_MIN_TOP_P = 1e-30  # smaller ones would be 0 in float32, and keep nothing


def _align(words: int) -> int:
    return -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS


@dataclass(frozen=True, slots=True)
class StepShape:
    """Numbers that determine where the parts of the inputs are."""

    tokens: int
    decode_rows: int  # slices of one token: the first rows of the step
    sampled_rows: int  # rows that are computed to the end
    draws: int  # rows from whose logits a token is drawn
    tiles: int  # of queries of prefill chunks

    def list_parts(self) -> tuple[tuple[str, int], ...]:
        """Name and number of words of each part, in order."""
        return (
            ("seeds", 2 * self.draws),
            ("temperatures", self.draws),
            ("log_min_ps", self.draws),
            ("top_ks", self.draws),
            ("top_ps", self.draws),
            ("draw_positions", self.draws),
            ("choices", self.draws),
            ("drawn_rows", self.draws),
            ("token_ids", self.tokens),
            ("positions", self.tokens),
            ("slots", self.tokens),
            ("decode_lengths", self.decode_rows),
            ("decode_starts", self.decode_rows),
            ("sampled_rows", self.sampled_rows),
            ("sampled_lengths", self.sampled_rows),
            ("sampled_starts", self.sampled_rows),
            ("tiles", 4 * self.tiles),
        )

    def place_parts(self) -> Iterator[tuple[str, int, int]]:
        """Name, first word and number of words of each part, in order."""
        begin = 0
        for name, length in self.list_parts():
            yield name, begin, length
            begin += _align(length)

    @property
    def num_words(self) -> int:
        """Words before the block tables."""
        return sum(_align(length) for _, length in self.list_parts())


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """The parts of a packed array on the device. All are int32 unless stated otherwise."""

    shape: StepShape
    sampling: SamplingRows
    drawn_rows: torch.Tensor  # [draws], of the sampled rows
    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens], block * block_size + place in the block
    decode_lengths: torch.Tensor  # [decode_rows], tokens in the cache after the step
    decode_starts: torch.Tensor  # [decode_rows], first entry of the row's block table
    sampled_rows: torch.Tensor  # [sampled_rows], of the step's rows
    sampled_lengths: torch.Tensor  # [sampled_rows], as decode_lengths
    sampled_starts: torch.Tensor  # [sampled_rows]
    tiles: torch.Tensor  # [tiles, 4], as attend_chunks takes them
    tables: torch.Tensor  # [entries]

    @staticmethod
    def unpack(words: torch.Tensor, shape: StepShape) -> "DeviceInputs":
        """Views of the parts of `words`, int32 [n]."""
        parts = {name: words[begin : begin + length] for name, begin, length in shape.place_parts()}
        sampling = SamplingRows(
            temperature=parts["temperatures"].view(torch.float32),
            log_min_p=parts["log_min_ps"].view(torch.float32),
            top_k=parts["top_ks"],
            top_p=parts["top_ps"].view(torch.float32),
            seed=parts["seeds"].view(torch.int64),
            position=parts["draw_positions"],
            choice=parts["choices"],
        )
        return DeviceInputs(
            shape=shape,
            sampling=sampling,
            drawn_rows=parts["drawn_rows"],
            token_ids=parts["token_ids"],
            positions=parts["positions"],
            slots=parts["slots"],
            decode_lengths=parts["decode_lengths"],
            decode_starts=parts["decode_starts"],
            sampled_rows=parts["sampled_rows"],
            sampled_lengths=parts["sampled_lengths"],
            sampled_starts=parts["sampled_starts"],
            tiles=parts["tiles"].view(-1, 4),
            tables=words[shape.num_words :],
        )


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of a prompt whose logprobs were asked for: each scores the token that follows it."""

    first_row: int  # of the rows that are computed to the end
    logprobs_spec: PromptLogprobsSpec
    slice_index: int  # of their slice in the StepBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed inputs of a step, and what the host needs to read its results."""

    shape: StepShape
    words: Words  # parts and block tables
    sample_specs: tuple[SampleSpec, ...]  # one for each draw
    drawn_slice_indices: tuple[int, ...]  # the slice of the StepBatch of each draw
    scored_rows: tuple[ScoredRows, ...]

    @property
    def is_decode_only(self) -> bool:
        """Whether every row is a decode slice that is sampled: what a graph can compute."""
        shape = self.shape
        return shape.tokens == shape.decode_rows == shape.draws and not self.scored_rows


class BlockTableCache:
    """Block tables as arrays. Only entries that changed since the last step are converted."""

    def __init__(self) -> None:
        self._tables: dict[SequenceId, tuple[list[BlockIndex], Words]] = {}

    def get_table(self, slice_: SequenceSlice, num_blocks: int) -> Words:
        """The first `num_blocks` entries of the slice's block table, int32."""
        wanted = list(slice_.block_table[:num_blocks])
        known, table = self._tables.get(slice_.sequence_id, ([], np.zeros(0, np.int32)))
        same = min(len(known), len(wanted))
        if known[:same] != wanted[:same]:
            same = 0
        if len(wanted) > len(table):
            table = np.resize(table, max(64, 2 * len(wanted)))
        if same < len(wanted):
            table[same : len(wanted)] = wanted[same:]
        if len(wanted) > len(known) or same == 0:
            self._tables[slice_.sequence_id] = wanted, table
        return table[: len(wanted)]

    def drop_unused_tables(self, slices: Sequence[SequenceSlice]) -> None:
        """Forget sequences that are not in this step, if most of them are not."""
        if len(self._tables) > _MAX_CACHED_TABLES * max(16, len(slices)):
            used = {slice_.sequence_id for slice_ in slices}
            self._tables = {key: self._tables[key] for key in self._tables.keys() & used}


class StepInputsBuilder:
    """Packs the inputs of steps over one cache."""

    def __init__(self, block_size: int, scratch_block: int) -> None:
        """`scratch_block` is where padding rows write; no sequence has it."""
        self._block_size = block_size
        self._scratch_slot = scratch_block * block_size
        self._tables = BlockTableCache()

    def build_inputs(
        self, batch: StepBatch, decode_rows: int | None = None, tokens: int | None = None
    ) -> StepInputs:
        """Pack a step.

        With `decode_rows`, pad a step of decode slices alone to so many rows; with `tokens`, pad
        any step to so many tokens.

        Raises ValueError for an empty slice or a block table that is too short.
        """
        order = sorted(range(len(batch.slices)), key=lambda i: len(batch.slices[i].token_ids) > 1)
        slices = [batch.slices[i] for i in order]
        self._tables.drop_unused_tables(slices)
        tables = [self._get_table(slice_) for slice_ in slices]
        ends = np.cumsum([len(slice_.token_ids) for slice_ in slices])
        scored = tuple(
            ScoredRows(int(end) - len(slice_.token_ids), slice_.logprobs_spec, place)
            for place, slice_, end in zip(order, slices, ends, strict=True)
            if slice_.logprobs_spec is not None
        )
        drawn = [i for i, slice_ in enumerate(slices) if slice_.sample_spec is not None]
        specs = tuple(s.sample_spec for s in slices if s.sample_spec is not None)
        parts = self._pack_rows(slices, tables) | _pack_sampling(specs)
        parts |= _pack_attention(slices, tables, ends)
        parts |= _pack_sampled_rows(parts, ends, drawn, is_scored=bool(scored))
        shape = StepShape(
            tokens=int(ends[-1]) if tokens is None else tokens,
            decode_rows=len(parts["decode_lengths"]),
            sampled_rows=len(parts["sampled_rows"]),
            draws=len(drawn),
            tiles=len(parts["tiles"]) // 4,
        )
        if decode_rows is not None:
            shape = StepShape(decode_rows, decode_rows, decode_rows, decode_rows, tiles=0)
        words = self._join_parts(shape, parts, tables)
        return StepInputs(shape, words, specs, tuple(order[i] for i in drawn), scored)

    def _get_table(self, slice_: SequenceSlice) -> Words:
        length = slice_.start + len(slice_.token_ids)
        blocks = -(-length // self._block_size)
        if not slice_.token_ids or len(slice_.block_table) < blocks:
            raise ValueError(
                f"sequence {slice_.sequence_id}: {len(slice_.token_ids)} tokens from position"
                f" {slice_.start} in {len(slice_.block_table)} blocks of {self._block_size}"
            )
        return self._tables.get_table(slice_, blocks)

    def _pack_rows(
        self, slices: Sequence[SequenceSlice], tables: Sequence[Words]
    ) -> dict[str, Array]:
        """Tokens, positions and slots of all rows: decode slices first, then chunks."""
        size = self._block_size
        starts, rows = [], []  # of decode slices
        positions, slots = [], []
        for slice_, table in zip(slices, tables, strict=True):
            if len(slice_.token_ids) == 1:
                starts.append(slice_.start)
                rows.append(int(table[slice_.start // size]) * size + slice_.start % size)
            else:
                place = np.arange(slice_.start, slice_.start + len(slice_.token_ids))
                positions.append(place)
                slots.append(table[place // size] * size + place % size)
        tokens = itertools.chain.from_iterable(slice_.token_ids for slice_ in slices)
        return {
            "token_ids": np.fromiter(tokens, np.int32),
            "positions": np.concatenate([np.array(starts, np.int64), *positions]),
            "slots": np.concatenate([np.array(rows, np.int64), *slots]),
        }

    def _join_parts(
        self,
        shape: StepShape,
        parts: dict[str, Array],
        tables: Sequence[Words],
    ) -> Words:
        words = np.zeros(shape.num_words + sum(len(table) for table in tables), np.int32)
        for name, begin, length in shape.place_parts():
            part = parts[name]
            target = words[begin : begin + length]
            if len(part) < length and name == "slots":  # padding rows write here
                target[:] = self._scratch_slot
            target[: len(part)] = part
        if tables:
            np.concatenate(tables, out=words[shape.num_words :])
        return words


def _pack_attention(
    slices: Sequence[SequenceSlice], tables: Sequence[Words], ends: Ints
) -> dict[str, Array]:
    """Lengths and block tables of all slices, and the tiles of prefill chunks."""
    starts = np.cumsum([0, *(len(table) for table in tables)])[:-1]
    lengths = np.array([slice_.start + len(slice_.token_ids) for slice_ in slices])
    decoding = sum(len(slice_.token_ids) == 1 for slice_ in slices)
    chunks = [
        PrefillChunk(int(end) - len(s.token_ids), len(s.token_ids), s.start, int(start))
        for s, end, start in zip(slices, ends, starts, strict=True)
        if len(s.token_ids) > 1
    ]
    return {
        "lengths": lengths,
        "starts": starts,
        "decode_lengths": lengths[:decoding],
        "decode_starts": starts[:decoding],
        "tiles": list_query_tiles(chunks).reshape(-1),
    }


def _pack_sampled_rows(
    parts: dict[str, Array], ends: Ints, drawn: list[int], *, is_scored: bool
) -> dict[str, Array]:
    """The rows that are computed to the end: those that are drawn, or all to score a prompt."""
    if is_scored:
        rows = np.arange(ends[-1])
        nothing = np.zeros(len(rows), np.int64)
        return {
            "sampled_rows": rows,
            "drawn_rows": ends[drawn] - 1,
            "sampled_lengths": nothing,
            "sampled_starts": nothing,
        }
    return {
        "sampled_rows": ends[drawn] - 1,
        "drawn_rows": np.arange(len(drawn)),
        "sampled_lengths": parts["lengths"][drawn],
        "sampled_starts": parts["starts"][drawn],
    }


def encode_source_row(row: int) -> int:
    """The token of a slice whose token is drawn in `row` of the step that is launched before."""
    return -1 - row


def resolve_source_rows(
    token_ids: torch.Tensor,  # int32 [tokens]
    last_tokens: torch.Tensor,  # int64, of the step that was launched before, by row
) -> None:
    """Replace encoded source rows by the tokens that were drawn there, on the device.

    A token of -1 ends its step with an error; meanwhile it must not crash the next one.
    """
    sources = (-1 - token_ids).clamp_(min=0)
    sampled = last_tokens.index_select(0, sources).clamp_(min=0)
    token_ids.copy_(torch.where(token_ids < 0, sampled, token_ids))


def build_sampling_rows(specs: Sequence[SampleSpec], device: torch.device) -> SamplingRows:
    """The parameters of some draws alone, on the device."""
    shape = StepShape(tokens=0, decode_rows=0, sampled_rows=0, draws=len(specs), tiles=0)
    parts = _pack_sampling(specs)
    words = np.zeros(shape.num_words, np.int32)
    for name, begin, length in shape.place_parts():
        if name in parts:
            words[begin : begin + length] = parts[name]
    return DeviceInputs.unpack(torch.from_numpy(words).to(device), shape).sampling


def _pack_sampling(specs: Sequence[SampleSpec]) -> dict[str, Array]:
    """Parameters of the draws. Floats keep their bits; rows of padding are greedy."""
    params = [spec.params for spec in specs]

    def floats(values: list[float]) -> Array:
        return np.array(values, np.float32).view(np.int32)

    seeds = np.array([param.seed & _SEED_MASK for param in params], np.uint64)
    return {
        "seeds": seeds.view(np.int32),
        "temperatures": floats([param.temperature for param in params]),
        "log_min_ps": floats(
            [math.log(param.min_p) if param.min_p > 0.0 else -math.inf for param in params]
        ),
        "top_ks": np.array([param.top_k for param in params], np.int32),
        "top_ps": floats([max(param.top_p, _MIN_TOP_P) for param in params]),
        "draw_positions": np.array([spec.position for spec in specs], np.int32),
        "choices": np.array([spec.choice_index for spec in specs], np.int32),
    }
