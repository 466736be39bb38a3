"""Copies into the memory of another process, by CUDA IPC: ours, with its checksum, and CUDA's own.

    python -m benchmarks.device.peer_copies [--blocks 128] [--layers 32] [--slab 65536]

One process owns an arena and exports it; this one opens it and copies blocks into it, all layers in
turn, one launch a layer, or in messages of several layers as a hand-off is cut. The contiguous copy
of the same number of bytes in the same run is what the rates are compared with. With two GPUs the
owner is on the second.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kv_kernels.triton.block_copy import (
    ChecksumParts,
    SlabPlaces,
    count_checksum_parts,
    launch_slab_move,
)
from kv_transfer.device.cuda_driver_api import CudaWorkDriver
from kv_transfer.device.cuda_views import view_device_words, view_pinned_words

_REPEATS = 10
_SPIN_CYCLES = 40_000_000  # during which a whole hand-off is queued, so that launches are not timed
_GB = 1e9


@dataclass(frozen=True, slots=True)
class HandoffShape:
    """What is copied: `blocks` blocks of `layers` slabs."""

    blocks: int
    layers: int
    slab_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.slab_bytes

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_bytes


class ArenaOwner:
    """A process that owns memory of a device and exports it."""

    def __init__(self, device: int, size: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.device.peer_copies",
                "--own",
                str(device),
                str(size),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.handle = bytes.fromhex(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate("")


def own_memory(device: int, size: int) -> None:
    """Allocate and export memory, and wait until the standard input ends."""
    driver = CudaWorkDriver(device)
    sys.stdout.write(driver.export_memory(driver.allocate(size)).hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def time_on_device(queue_work: Callable[[], object]) -> float:
    """Median seconds of what is queued, as the device sees it, without the time of the launches."""
    seconds = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SPIN_CYCLES)
        begin.record()
        queue_work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds))


@dataclass(frozen=True, slots=True)
class CopyVariant:
    """How the copies are launched."""

    layers: int  # of a launch
    streams: int = 1  # used in turn
    has_device_numbers: bool = True  # else the kernel reads them in pinned memory
    has_device_sums: bool = (
        False  # then copied to the host; else the kernel writes to pinned memory
    )
    num_warps: int = 4
    copies: bool = True  # else only checksums, as decode does

    def __str__(self) -> str:
        numbers = "device" if self.has_device_numbers else "pinned"
        sums = "device" if self.has_device_sums else "pinned"
        return (
            f"{'copy' if self.copies else 'check'}, {self.layers} layers a launch, "
            f"{self.streams} streams, numbers {numbers}, sums {sums}, {self.num_warps} warps"
        )


VARIANTS = (
    *(CopyVariant(layers) for layers in (1, 2, 4, 8, 32)),
    *(CopyVariant(layers, copies=False) for layers in (1, 4, 8)),
    *(CopyVariant(layers, streams=4) for layers in (1, 4)),
    *(CopyVariant(layers, num_warps=8) for layers in (1, 4)),
    CopyVariant(1, has_device_numbers=False),
    CopyVariant(1, has_device_sums=True),
    CopyVariant(4, has_device_sums=True),
)


class HandoffCopies:
    """The copies of one hand-off into a peer's arena, as a prefill node launches them."""

    def __init__(self, shape: HandoffShape, peer: torch.Tensor) -> None:
        self._shape = shape
        words = shape.total_bytes // 8
        self.source = torch.randint(-(1 << 62), 1 << 62, (words,), device="cuda")
        self.peer = peer[:words]
        order = torch.randperm(shape.blocks, generator=torch.Generator().manual_seed(1))
        numbers = order.to(torch.int32)
        self._blocks = {True: numbers.cuda(), False: view_pinned_words(numbers, torch.int32)}
        parts = torch.zeros(shape.layers * shape.blocks * 64, dtype=torch.int64)
        self._host_parts = parts.pin_memory()
        self._parts = {True: parts.cuda(), False: view_pinned_words(parts)}
        self._streams = [torch.cuda.Stream() for _ in range(4)]

    def copy_all(self, variant: CopyVariant) -> None:
        """Queue all copies behind the current stream's work, which then waits for them."""
        slab, block = self._shape.slab_bytes // 8, self._shape.block_bytes // 8
        words = variant.layers * slab
        count = count_checksum_parts(words)
        blocks = self._blocks[variant.has_device_numbers]
        streams, main = self._streams[: variant.streams], torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        for number in range(self._shape.layers // variant.layers):
            first = number * variant.layers * slab
            place = slice(number * blocks.numel() * count, (number + 1) * blocks.numel() * count)
            parts = self._parts[variant.has_device_sums][place]
            with torch.cuda.stream(streams[number % variant.streams]):
                launch_slab_move(
                    SlabPlaces(self.source, block, first),
                    SlabPlaces(self.peer, block, first) if variant.copies else None,
                    blocks,
                    blocks,
                    words,
                    ChecksumParts(parts.view(-1, count)),
                    num_warps=variant.num_warps,
                )
                if variant.has_device_sums:
                    self._host_parts[place].copy_(parts, non_blocking=True)
        for stream in streams:
            main.wait_stream(stream)


def measure(shape: HandoffShape) -> dict[str, float]:
    """Rates in GB/s of the copies of one hand-off, by what copies it."""
    has_peer_gpu = torch.cuda.device_count() > 1
    owner = ArenaOwner(1 if has_peer_gpu else 0, shape.total_bytes)
    try:
        driver = CudaWorkDriver(0)
        peer = view_device_words(driver.open_memory(owner.handle), shape.total_bytes)
        copies = HandoffCopies(shape, peer)
        rates = {"contiguous": _rate(shape, partial(copies.peer.copy_, copies.source))}
        for variant in VARIANTS:
            copies.peer.zero_()
            rates[str(variant)] = _rate(shape, partial(copies.copy_all, variant))
            if variant.copies and not torch.equal(copies.peer.to("cuda:0"), copies.source):
                raise RuntimeError(f"the copied blocks differ from their source: {variant}")
        return rates
    finally:
        owner.close()


def _rate(shape: HandoffShape, queue_work: Callable[[], object]) -> float:
    queue_work()
    torch.cuda.synchronize()
    return shape.total_bytes / time_on_device(queue_work) / _GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slab", type=int, default=1 << 16)
    parser.add_argument("--own", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.own:
        own_memory(*given.own)
        return
    rates = measure(HandoffShape(given.blocks, given.layers, given.slab))
    for name, rate in rates.items():
        share = rate / rates["contiguous"]
        sys.stdout.write(f"{name}: {rate:.0f} GB/s, {share:.0%} of the contiguous copy\n")


if __name__ == "__main__":
    main()
