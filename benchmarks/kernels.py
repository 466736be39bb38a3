"""`kernels`: paged decode attention, relative to this device's memory copy rate in the same run.

Decode reads every key and value of its contexts once, and little else. So the bytes of KV per
second, as a share of what a plain copy moves (reads and writes), say how close the kernel is to the
memory's limit. On a GPU this is the Triton kernel, on a CPU the torch kernel with one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console

from benchmarks.figures.report import ResultRow, make_row, print_rows
from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.paged_attention import AttentionContext, PagedCache

HELP = "paged decode attention against this device's rate of copying"
KV_HEADS, GROUP, DIM, BLOCK_SIZE = 8, 4, 128, 16
BATCHES = {"cuda": (1, 16, 64, 256), "cpu": (1, 4, 16)}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes: beyond the caches


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
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device, rounds)
    rows = [make_row("attention/copy", copied / 1e9, "GB/s", command)]
    for batch in BATCHES[device.type]:
        rate = _decode_rate(device, batch, context, rounds)
        rows.append(
            make_row(
                f"attention/decode_{context}_batch_{batch}",
                rate / 1e9,
                "GB/s",
                command,
                copied / 1e9,
            )
        )
    return rows


def _decode_rate(device: torch.device, batch: int, context: int, rounds: int) -> float:
    """Return bytes of KV (bf16) per second; the blocks of each sequence are scattered."""
    blocks = context // BLOCK_SIZE
    arena = torch.randn(batch * blocks, 1, 2, KV_HEADS, BLOCK_SIZE, DIM, device=device).to(
        torch.bfloat16
    )
    order = torch.randperm(batch * blocks).reshape(batch, blocks).numpy()
    contexts = [AttentionContext(order[number], context) for number in range(batch)]
    parts = kernels_for(device).plan_decode(PagedCache.from_arena(arena), contexts, torch.bfloat16)
    query = torch.randn(batch, KV_HEADS * GROUP, DIM, device=device).to(torch.bfloat16)
    out = torch.empty_like(query)
    return arena.nbytes / _median_seconds(
        lambda: [part(query, 0, out) for part in parts], device, rounds
    )


def _median_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median seconds of a call after a warm-up, by events on a GPU's stream."""
    for _ in range(3):
        call()
    if device.type == "cpu":
        return statistics.median(_timed(call) for _ in range(rounds))
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(rounds)
    ]
    for before, after in spans:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    seconds: float = statistics.median(before.elapsed_time(after) for before, after in spans) / 1e3
    return seconds


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
