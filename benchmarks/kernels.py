"""`kernels`: attention and writes of KV, relative to this device's own rates in the same run.

Decode reads every key and value of its contexts once, and little else. So the bytes of KV per
second, as a share of what a plain copy moves (reads and writes), say how close the kernel is to the
memory's limit; likewise for the rotation of queries and keys with the write of KV. Prefill is bound
by arithmetic: its limit is the rate of a large product of matrices. On a GPU these are the Triton
kernels, replayed in CUDA graphs as in decode steps, and on a CPU the torch kernels with one thread.
"""

import argparse

import torch
from rich.console import Console

from benchmarks.device.timing import Call, capture_calls, median_seconds
from benchmarks.figures.report import ResultRow, make_row, print_rows
from kv_kernels.reference import elementwise, paged_attention
from kv_kernels.reference.paged_attention import AttentionContext, PagedCache, SlotMapping
from node_engine.model.config.rope import compute_angles

HELP = "paged attention and writes of KV against this device's rates of copying and arithmetic"
KV_HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 16
HEADS = KV_HEADS * GROUP
BATCHES = {"cuda": (1, 16, 64, 256), "cpu": (1, 4, 16)}
PROMPTS = {"cuda": (512, 2048, 8192), "cpu": (512,)}  # tokens
WRITES = {"cuda": (1, 64, 2048), "cpu": (1, 64)}  # tokens of a step
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes: beyond the caches
_MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens of each sequence (default 2048)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="the median of these counts (default 20)"
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = measure_kernels(device, options.context, options.rounds, command)
    print_rows(console, f"kernels on {device.type}", rows)
    return rows


def measure_kernels(
    device: torch.device, context: int, rounds: int, command: str
) -> list[ResultRow]:
    copied, multiplied = _copy_rate(device, rounds), _product_rate(device, rounds)
    rows = [
        make_row("attention/copy", copied / 1e9, "GB/s", command),
        make_row("attention/product", multiplied / 1e12, "TFLOP/s", command),
    ]
    for batch in BATCHES[device.type]:
        rate = _decode_rate(device, batch, context, rounds) / 1e9
        name = f"attention/decode_{context}_batch_{batch}"
        rows.append(make_row(name, rate, "GB/s", command, copied / 1e9))
    for tokens in PROMPTS[device.type]:
        rate = _prefill_rate(device, tokens, rounds) / 1e12
        name = f"attention/prefill_{tokens}"
        rows.append(make_row(name, rate, "TFLOP/s", command, multiplied / 1e12))
    for tokens in WRITES[device.type]:
        rate = _write_rate(device, tokens, rounds) / 1e9
        name = f"attention/rotate_and_write_{tokens}"
        rows.append(make_row(name, rate, "GB/s", command, copied / 1e9))
    return rows


def _copy_rate(device: torch.device, rounds: int) -> float:
    """Return bytes per second, read and written."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, rounds)


def _product_rate(device: torch.device, rounds: int) -> float:
    """Return operations per second of a product of bf16 matrices."""
    size = _MATRIX_SIZE[device.type]
    left, right = _randn(device, size, size), _randn(device, size, size)
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device, rounds)


def _decode_rate(device: torch.device, batch: int, context: int, rounds: int) -> float:
    """Return bytes of KV (bf16) per second; the blocks of each sequence are scattered."""
    blocks = context // BLOCK_SIZE
    length = blocks * BLOCK_SIZE
    call = _plan_decode(device, batch, length)
    kv_bytes = batch * length * 2 * KV_HEADS * DIM * torch.bfloat16.itemsize
    return kv_bytes / median_seconds(call, device, rounds)


def _plan_decode(device: torch.device, batch: int, length: int) -> Call:
    if device.type == "cuda":
        from benchmarks.device import triton_calls

        sizes = triton_calls.AttentionSizes(HEADS, KV_HEADS, DIM, BLOCK_SIZE)
        return capture_calls(triton_calls.plan_decode(sizes, device, batch, length), device)
    blocks = length // BLOCK_SIZE
    cache = _make_cache(device, batch * blocks)
    query = _randn(device, batch, HEADS, DIM)
    out = torch.empty_like(query)
    tables = torch.randperm(batch * blocks).reshape(batch, blocks)
    contexts = [AttentionContext(table.numpy(), length) for table in tables]
    parts = paged_attention.plan_decode(cache, contexts, query.dtype)
    return lambda: [part(query, 0, out) for part in parts]


def _prefill_rate(device: torch.device, tokens: int, rounds: int) -> float:
    """Return operations per second of causal attention of one prompt, in one chunk."""
    operations = 4 * HEADS * DIM * tokens * (tokens + 1) // 2
    return operations / median_seconds(_plan_prefill(device, tokens), device, rounds)


def _plan_prefill(device: torch.device, tokens: int) -> Call:
    if device.type == "cuda":
        from benchmarks.device import triton_calls

        sizes = triton_calls.AttentionSizes(HEADS, KV_HEADS, DIM, BLOCK_SIZE)
        return triton_calls.plan_prefill(sizes, device, tokens)
    blocks = -(-tokens // BLOCK_SIZE)
    cache, query = _make_cache(device, blocks), _randn(device, tokens, HEADS, DIM)
    out = torch.empty_like(query)
    mask = paged_attention.causal_mask(tokens, query.dtype, query.device)
    context = AttentionContext(torch.randperm(blocks).numpy(), tokens)
    part = paged_attention.plan_prefill(cache, 0, tokens, context, mask)
    return lambda: part(query, 0, out)


def _write_rate(device: torch.device, tokens: int, rounds: int) -> float:
    """Return bytes per second of rotating queries and keys and writing KV, read and written."""
    values = (HEADS + 2 * KV_HEADS) * DIM * torch.bfloat16.itemsize
    return 2 * tokens * values / median_seconds(_plan_write(device, tokens), device, rounds)


def _plan_write(device: torch.device, tokens: int) -> Call:
    if device.type == "cuda":
        from benchmarks.device import triton_calls

        sizes = triton_calls.AttentionSizes(HEADS, KV_HEADS, DIM, BLOCK_SIZE)
        return capture_calls(triton_calls.plan_rotate_and_write(sizes, device, tokens), device)
    cache = _make_cache(device, -(-tokens // BLOCK_SIZE))
    qkv = _randn(device, tokens, HEADS + 2 * KV_HEADS, DIM)
    cos, sin = compute_angles(
        torch.rand(DIM // 2, device=device), torch.arange(tokens, device=device), qkv.dtype
    )
    slots = torch.randperm(len(cache.arena) * BLOCK_SIZE)[:tokens]
    places = SlotMapping(slots // BLOCK_SIZE, slots % BLOCK_SIZE)

    def rotate_and_write() -> None:
        elementwise.rotary_(qkv[:, : HEADS + KV_HEADS], cos, sin)
        paged_attention.write_kv(qkv[:, HEADS:], cache, 0, places)

    return rotate_and_write


def _randn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def _make_cache(device: torch.device, blocks: int) -> PagedCache:
    return PagedCache.from_arena(_randn(device, blocks, 1, 2, KV_HEADS, BLOCK_SIZE, DIM))
