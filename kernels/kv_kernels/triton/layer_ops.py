"""The token-wise operations of a transformer layer in Triton: one launch each.

`reference/elementwise.py` computes the same in torch. All arithmetic is in fp32; results are
rounded once, when they are stored.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from kv_kernels.reference.paged_attention import PagedCache

_SILU_BLOCK = 1024  # elements that one program processes


@triton.jit
def add_and_normalize(
    x,  # [tokens, WIDTH], contiguous
    residual,  # [tokens, WIDTH], contiguous, overwritten with the sum
    weight,  # [WIDTH]
    row,  # first element of the row
    column,
    inside,  # column < WIDTH
    eps,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """RMSNorm of one row of x + residual, or of x alone, in fp32."""
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual + row + column, stored, mask=inside)
        value = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / WIDTH + eps)
    return value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def gate_with_silu(cells, inside, WIDTH: tl.constexpr):
    """SiLU of what is at `cells` times what is WIDTH elements behind, in fp32."""
    gate = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(cells + WIDTH, mask=inside, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


# grid: [tokens]
@triton.jit
def _add_rms_norm_kernel(
    x,  # [tokens, WIDTH], contiguous
    residual,  # [tokens, WIDTH], contiguous, overwritten with the sum
    weight,  # [WIDTH]
    out,  # [tokens, WIDTH], contiguous
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, rounded up to a power of two
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    normed = add_and_normalize(x, residual, weight, row, column, inside, eps, WIDTH, HAS_RESIDUAL)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, width], contiguous
    residual: torch.Tensor | None,  # [tokens, width], contiguous: becomes x + residual
    weight: torch.Tensor,  # [width]
    eps: float,
) -> torch.Tensor:  # [tokens, width]
    """RMSNorm of x + residual (Zhang and Sennrich, 2019), or of x alone."""
    out = torch.empty_like(x)
    tokens, width = x.shape
    columns = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        WIDTH=width,
        COLUMNS=columns,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, columns // 512)),
    )
    return out


# grid: [tokens, (heads + 2 * kv_heads) / HEADS]
@triton.jit
def _rotate_and_write_kv_kernel(
    qkv,  # [tokens, heads + 2 * kv_heads, dim], contiguous
    query,  # [tokens, heads, dim], contiguous: the result
    cos,  # [tokens, dim], both halves equal
    sin,  # [tokens, dim], the first half negated
    norm_weight,  # [heads + kv_heads, dim], or anything without QK norm
    slab,  # [blocks, 2, kv_heads, block_size, dim], all but blocks contiguous
    slots,  # int32 [tokens], block * BLOCK_SIZE + place in the block
    block_stride,  # elements between blocks of slab
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # that one program processes: a power of two that divides both
    HALF: tl.constexpr,  # dim / 2
    HALF_COLUMNS: tl.constexpr,  # HALF, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF_COLUMNS)[None, :]
    inside = (column < HALF) & (head >= 0)
    row = qkv + token * (QUERY_HEADS + 2 * KV_HEADS) * 2 * HALF + head * 2 * HALF + column
    low = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)
    first = group * HEADS
    if first < QUERY_HEADS + KV_HEADS:
        if QK_NORM:
            total = tl.sum(low * low + high * high, 1)[:, None]
            scale = 1.0 / tl.sqrt_rn(total / (2 * HALF) + eps)
            weight = norm_weight + head * 2 * HALF + column
            low = low * scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
            high = high * scale * tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
        angle = token * 2 * HALF + column
        angle_ok = column < HALF
        cosine = tl.load(cos + angle, mask=angle_ok, other=0.0).to(tl.float32)
        sine = tl.load(sin + angle + HALF, mask=angle_ok, other=0.0).to(tl.float32)
        rotated = low * cosine - high * sine
        high = high * cosine + low * sine
        low = rotated
    if first < QUERY_HEADS:
        cell = query + (token * QUERY_HEADS + head) * 2 * HALF + column
        tl.store(cell, low.to(query.dtype.element_ty), mask=inside)
        tl.store(cell + HALF, high.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        place = (head - QUERY_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
        cell = slab + (slot // BLOCK_SIZE).to(tl.int64) * block_stride + place * 2 * HALF + column
        tl.store(cell, low.to(slab.dtype.element_ty), mask=inside)
        tl.store(cell + HALF, high.to(slab.dtype.element_ty), mask=inside)


def rotate_and_write_kv(
    qkv: torch.Tensor,  # [tokens, heads + 2 * kv_heads, dim], contiguous
    cos: torch.Tensor,  # [tokens, 1, dim], both halves equal
    sin: torch.Tensor,  # [tokens, 1, dim], the first half negated
    norm_weight: torch.Tensor | None,  # [heads + kv_heads, dim]
    eps: float,
    cache: PagedCache,
    layer: int,
    slots: torch.Tensor,  # int32 [tokens], block * block_size + place in the block
    query: torch.Tensor,  # [tokens, heads, dim], contiguous
) -> None:
    """QK norm and rotary embedding; queries go to `query`, keys and values to the cache.

    Rotary position embedding after Su et al., 2021, dimension i paired with i + dim / 2.
    """
    tokens, all_heads, dim = qkv.shape
    slab, kv_heads = cache.layer_slabs[layer], cache.kv_heads
    heads = all_heads - 2 * kv_heads
    per_program = min(8, (heads | kv_heads) & -(heads | kv_heads))
    _rotate_and_write_kv_kernel[(tokens, all_heads // per_program)](
        qkv,
        query,
        cos,
        sin,
        qkv if norm_weight is None else norm_weight,
        slab,
        slots,
        slab.stride(0),
        eps,
        QUERY_HEADS=heads,
        KV_HEADS=kv_heads,
        HEADS=per_program,
        HALF=dim // 2,
        HALF_COLUMNS=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=cache.block_size,
        QK_NORM=norm_weight is not None,
        num_warps=2,
    )


# grid: [tokens, splits of width]
@triton.jit
def _silu_mul_kernel(
    gate_up,  # [tokens, 2 * width], contiguous
    out,  # [tokens, width], contiguous
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gated = gate_with_silu(gate_up + token * 2 * WIDTH + column, inside, WIDTH)
    tl.store(out + token * WIDTH + column, gated.to(out.dtype.element_ty), mask=inside)


def silu_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * width], contiguous
) -> torch.Tensor:  # [tokens, width]
    """SiLU of the first half times the second half."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    _silu_mul_kernel[(tokens, triton.cdiv(width, _SILU_BLOCK))](
        gate_up, out, WIDTH=width, BLOCK=_SILU_BLOCK
    )
    return out
