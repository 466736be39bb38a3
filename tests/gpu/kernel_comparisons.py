"""Compares the Triton kernels with their twins in torch and NumPy, and returns the errors.

Kernels run on the device that they get: on a GPU or, on the CPU, in Triton's interpreter. Twins run
on the CPU in fp32. An error is the largest difference relative to 1 + the exact magnitude.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.types import SamplingParams
from kv_kernels.reference import elementwise, paged_attention
from kv_kernels.reference.paged_attention import AttentionContext, PagedCache, SlotMapping
from kv_kernels.triton import layer_ops
from kv_kernels.triton.prefill_attention import PrefillChunk, attend_chunks, list_query_tiles
from kv_kernels.triton.row_linear import multiply_row
from kv_kernels.triton.sampling import sample_rows
from kv_kernels.triton.split_decode import SplitDecode
from node_engine.core.step.step_batch import SampleSpec
from node_engine.model.config.rope import compute_angles
from node_engine.model.gpu.step_inputs import build_sampling_rows
from node_engine.model.sampling.sampler import draw_token

LAYER = 1  # of two
_NO_BLOCK = 1 << 28  # in the block tables where no kernel may read
SAMPLING_FILTERS = {
    "greedy": SamplingParams(1, temperature=0.0),
    "temperature": SamplingParams(1, temperature=1.0),
    "min-p": SamplingParams(1, temperature=1.7, min_p=0.4),
    "top-k": SamplingParams(1, temperature=1.7, top_k=3),
    "large top-k": SamplingParams(1, temperature=1.0, top_k=1100),
    "tiny top-p": SamplingParams(1, temperature=1.0, top_p=1e-50),
    "top-k of all": SamplingParams(1, temperature=1.0, top_k=200_000),
    "top-p": SamplingParams(1, temperature=1.0, top_p=0.9),
    "small top-p": SamplingParams(1, temperature=0.3, top_p=0.01),
    "top-k and top-p": SamplingParams(1, temperature=1.7, top_k=40, top_p=0.5),
    "all filters": SamplingParams(1, temperature=1.3, top_k=25, top_p=0.8, min_p=0.01),
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of an attention layer."""

    kv_heads: int
    group: int  # query heads for each KV head
    dim: int
    block_size: int
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _measure_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN if the result has one."""
    exact = exact.float()
    return float(((result.cpu().float() - exact).abs() / (1.0 + exact.abs())).max())


def _nan_last(error: float) -> tuple[bool, float]:
    """A key by which NaN is the largest error."""
    return math.isnan(error), error


def measure_norm_error(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device, *, residual: bool
) -> float:
    """The error of `add_rms_norm`, in the norm and in the sum that it stores."""
    x, added, weight = (
        randn(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(((tokens, width), (tokens, width), (width,)))
    )
    total = x.float() + added.float() if residual else x.float()
    exact = elementwise.RMSNorm(weight.float(), 1e-5)(total)
    stored = added.clone().to(device) if residual else None
    result = layer_ops.add_rms_norm(x.to(device), stored, weight.to(device), 1e-5)
    errors = [_measure_error(result, exact)]
    if stored is not None:
        errors.append(_measure_error(stored, total))
    return max(errors, key=_nan_last)


def measure_row_product_error(
    features: int, width: int, dtype: torch.dtype, device: torch.device, *, bias: bool
) -> float:
    """The error of `multiply_row`."""
    x = randn(1, width, dtype=dtype, seed=0)
    weight = randn(features, width, dtype=dtype, seed=1) / 16
    added = randn(features, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0.0 if added is None else added.double())
    product = multiply_row(
        x.to(device), weight.to(device), None if added is None else added.to(device)
    )
    return _measure_error(product, exact.float())


def measure_silu_error(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    gate_up = randn(tokens, 2 * width, dtype=dtype, seed=0) * 3
    exact = elementwise.silu_mul(gate_up.float())
    return _measure_error(layer_ops.silu_mul(gate_up.to(device)), exact)


def measure_rotation_error(
    shape: AttentionShape, tokens: int, dtype: torch.dtype, device: torch.device, *, qk_norm: bool
) -> float:
    """The error of `rotate_and_write_kv` in queries and arena.

    Infinite if values, or slots that no token is written to, are not equal bit by bit.
    """
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    blocks = -(-tokens // shape.block_size) + 2
    arena = randn(blocks, 2, 2, kv_heads, shape.block_size, dim, dtype=dtype, seed=0)
    qkv = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype, seed=1)
    weight = randn(heads + kv_heads, dim, dtype=dtype, seed=2) if qk_norm else None
    slots = torch.randperm(blocks * shape.block_size, generator=torch.Generator().manual_seed(3))
    slots = slots[:tokens]
    positions = torch.arange(tokens) * 977 % 5000
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = compute_angles(frequencies, positions, dtype)

    exact_qkv, exact_arena = qkv.clone().float(), arena.clone().float()
    rotated = exact_qkv[:, : heads + kv_heads]
    if weight is not None:
        rotated.copy_(elementwise.RMSNorm(weight.float(), 1e-6)(rotated))
    elementwise.rotary_(rotated, cos.float(), sin.float())
    paged_attention.write_kv(
        exact_qkv[:, heads:],
        PagedCache.from_arena(exact_arena),
        LAYER,
        SlotMapping(slots // shape.block_size, slots % shape.block_size),
    )

    written = arena.to(device)
    result = torch.empty(tokens, heads, dim, dtype=dtype, device=device)
    layer_ops.rotate_and_write_kv(
        qkv.to(device),
        cos.to(device),
        sin.to(device),
        None if weight is None else weight.to(device),
        1e-6,
        PagedCache.from_arena(written),
        LAYER,
        slots.to(device, torch.int32),
        result,
    )
    same = written.cpu().float() == exact_arena
    same[slots // shape.block_size, LAYER, 0, :, slots % shape.block_size] = True  # rotated keys
    if not bool(same.all()):
        return math.inf
    return max(
        _measure_error(result, exact_qkv[:, :heads]),
        _measure_error(written, exact_arena),
        key=_nan_last,
    )


@dataclass(frozen=True, slots=True)
class _PagedContexts:
    """Sequences in an arena of shuffled blocks, and their tables one after another."""

    arena: torch.Tensor
    contexts: tuple[AttentionContext, ...]
    tables: torch.Tensor  # int32 [entries], with entries that no kernel may read between tables
    starts: torch.Tensor  # int32 [sequences]


def _make_contexts(
    shape: AttentionShape, lengths: Sequence[int], dtype: torch.dtype
) -> _PagedContexts:
    widths = [-(-length // shape.block_size) for length in lengths]
    total = sum(widths)
    arena = randn(total + 1, 2, 2, shape.kv_heads, shape.block_size, shape.dim, dtype=dtype, seed=0)
    order = torch.randperm(total + 1, generator=torch.Generator().manual_seed(1)).numpy()
    tables = np.split(order[:total], np.cumsum(widths)[:-1])
    flat: list[int] = []
    starts = []
    for table in tables:
        flat += [_NO_BLOCK] * 3
        starts.append(len(flat))
        flat += table.tolist()
    return _PagedContexts(
        arena,
        tuple(
            AttentionContext(table, length) for table, length in zip(tables, lengths, strict=True)
        ),
        torch.tensor([*flat, _NO_BLOCK], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
    )


def _poison_unseen(paged: _PagedContexts, shape: AttentionShape, window: int | None) -> None:
    """Fill what one query per sequence does not see with NaN; without a window, unwritten slots."""
    seen = torch.zeros(len(paged.arena), shape.block_size, dtype=torch.bool)
    for context in paged.contexts:
        first = 0 if window is None else max(0, context.length - window)
        place = np.arange(first, context.length)
        blocks = context.block_table[place // shape.block_size]
        seen[torch.from_numpy(blocks), torch.from_numpy(place % shape.block_size)] = True
    paged.arena.masked_fill_(~seen[:, None, None, None, :, None], torch.nan)


def _place_on_device(
    paged: _PagedContexts, device: torch.device, first_block: int
) -> tuple[PagedCache, torch.Tensor]:
    """The cache on the device, behind so many other blocks, and the block tables."""
    sizes = (first_block + len(paged.arena), *paged.arena.shape[1:])
    arena = torch.empty(sizes, dtype=paged.arena.dtype, device=device)
    arena[first_block:] = paged.arena.to(device)
    return PagedCache.from_arena(arena), (paged.tables + first_block).to(device)


def measure_decode_error(
    shape: AttentionShape,
    lengths: Sequence[int],  # 0 is a row of padding
    splits: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    first_block: int = 0,
) -> float:
    """The error of `SplitDecode`; slots that no query sees are NaN."""
    paged = _make_contexts(shape, lengths, dtype)
    wide = randn(len(lengths), shape.heads + 1, shape.dim, dtype=dtype, seed=2)
    query = wide[:, :-1]  # a slice of the fused projection: rows are not adjacent
    longest_first = sorted(
        (row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]
    )
    contexts = [
        paged_attention.clip_to_window(paged.contexts[row], shape.window, 1, shape.block_size)
        for row in longest_first
    ]
    exact_rows = torch.zeros(len(contexts), shape.heads, shape.dim)
    cache = PagedCache.from_arena(paged.arena.float())
    for part in paged_attention.plan_decode(cache, contexts, torch.float32):
        part(query[longest_first].float(), LAYER, exact_rows)
    exact = torch.zeros(query.shape)
    exact[longest_first] = exact_rows

    _poison_unseen(paged, shape, shape.window)
    cache, tables = _place_on_device(paged, device, first_block)
    decode = SplitDecode.allocate(
        tables,
        paged.starts.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        shape.heads,
        shape.dim,
        splits,
        upcast=device.type == "cpu",
    )
    decode.sums.fill_(torch.nan)
    out = torch.full(query.shape, torch.nan, dtype=dtype, device=device)
    decode.attend(wide.to(device)[:, :-1], cache, LAYER, shape.window, out)
    return _measure_error(out, exact)


def measure_prefill_error(
    shape: AttentionShape,
    chunks: Sequence[tuple[int, int]],  # first position and tokens of each
    dtype: torch.dtype,
    device: torch.device,
    *,
    first_block: int = 0,
) -> float:
    """The error of `attend_chunks`; unwritten slots are NaN.

    Infinite if it writes rows of queries that belong to no chunk.
    """
    paged = _make_contexts(shape, [start + count for start, count in chunks], dtype)
    rows = sum(count for _, count in chunks)
    # Rows of decode slices come before those of chunks.
    wide = randn(rows + 1, shape.heads + 1, shape.dim, dtype=dtype, seed=2)
    query, exact = wide[:, :-1], torch.zeros(rows + 1, shape.heads, shape.dim)
    cache = PagedCache.from_arena(paged.arena.float())
    listed = []
    first = 1
    for (start, count), context, entry in zip(chunks, paged.contexts, paged.starts, strict=True):
        cpu = torch.device("cpu")
        mask = (
            paged_attention.causal_mask(context.length, torch.float32, cpu)
            if shape.window is None
            else paged_attention.window_mask(shape.window, torch.float32, cpu)
        )
        seen = paged_attention.clip_to_window(context, shape.window, count, shape.block_size)
        paged_attention.plan_prefill(cache, first, count, seen, mask)(query.float(), LAYER, exact)
        listed.append(PrefillChunk(first, count, start, int(entry)))
        first += count

    _poison_unseen(paged, shape, None)
    cache, tables = _place_on_device(paged, device, first_block)
    out = torch.full(query.shape, torch.nan, dtype=dtype, device=device)
    attend_chunks(
        wide.to(device)[:, :-1],
        cache,
        LAYER,
        tables,
        torch.from_numpy(list_query_tiles(listed)).to(device),
        shape.window,
        out,
        upcast=device.type == "cpu",
    )
    if not bool(out[0].isnan().all()):
        return math.inf
    return _measure_error(out[1:], exact[1:])


def count_different_draws(
    params: SamplingParams,
    vocab: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_allowed: int | None = None,
) -> int:
    """Rows for which `sample_rows` and `draw_token` return different tokens.

    Logits are flat, peaked, or rounded so that many are equal; each row has a seed of its own. With
    `num_allowed`, all tokens of a row but so many are minus infinity, as a grammar leaves them.
    """
    random = np.random.default_rng(vocab)
    specs = [
        SampleSpec(
            SamplingParams(
                max_tokens=1,
                temperature=params.temperature,
                min_p=params.min_p,
                top_k=params.top_k,
                top_p=params.top_p,
                seed=int(random.integers(0, 2**64, dtype=np.uint64)),
            ),
            row % 3,
            7 + row,
        )
        for row in range(rows)
    ]
    scale = torch.tensor(list(itertools.islice(itertools.cycle((0.5, 3.0, 8.0)), rows)))
    logits = randn(rows, vocab, dtype=torch.float32, seed=vocab) * scale[:, None]
    logits[::2] = logits[::2].round()
    if num_allowed is not None:
        places = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(1)).argsort(1)
        logits.scatter_(1, places[:, num_allowed:], -torch.inf)
    logits = logits.to(dtype)
    drawn = sample_rows(logits.to(device), build_sampling_rows(specs, device)).tolist()
    wanted = [
        draw_token(values, spec) if params.temperature else int(values.argmax())
        for values, spec in zip(logits.float().numpy(), specs, strict=True)
    ]
    return sum(token != want for token, want in zip(drawn, wanted, strict=True))


def sample_damaged_rows(device: torch.device, temperature: float) -> list[int]:
    """Tokens of a row of zeros, then of rows with a NaN, an infinity, and nothing but -infinity."""
    logits = torch.zeros(4, 100)
    logits[1, 5] = torch.nan
    logits[2, 5] = torch.inf
    logits[3] = -torch.inf
    spec = SampleSpec(SamplingParams(max_tokens=1, temperature=temperature, seed=1), 0, 3)
    tokens: list[int] = sample_rows(
        logits.to(device), build_sampling_rows([spec] * 4, device)
    ).tolist()
    return tokens
