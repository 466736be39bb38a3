"""What the copies of a hand-off cost the prompt that is computed meanwhile, without any plane.

    python -m benchmarks.device.copies_beside_prefill [--tokens 2048] [--group 8] [--message 4]

An engine with random weights of the shape of an 8B Llama computes prompts. Whenever a group of
layers is computed, its blocks are copied into the memory of another process, as a prefill node
does, but by the thread that has launched the step. Prompts with and without copies alternate; the
figure is the median time of a prompt over that without copies. With two GPUs the other process is
on the second.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from baton.kv.device_event import DeviceEvent
from baton.types import BlockIndex
from benchmarks.clusters.llama_folders import LLAMA_CONFIGS, write_llama_folder
from benchmarks.device.engine_loads import EngineSizes, LoadedEngine
from benchmarks.device.peer_copies import ArenaOwner
from benchmarks.device.section_run import MeasuredModel
from kv_kernels.triton.block_copy import (
    ChecksumParts,
    SlabPlaces,
    count_checksum_parts,
    launch_slab_move,
)
from kv_transfer.device.cuda_driver_api import CudaWorkDriver
from kv_transfer.device.cuda_views import view_device_words, view_pinned_words
from node_engine.core.step.step_batch import StepBatch
from node_engine.model.config.model_config import load_model_config
from node_engine.model.gpu.gpu_engine import GpuEngine

_STREAMS = 4
_WARM_UP = 2  # prompts of each kind


@dataclass
class HandoffLaunches:
    """A LayerCallback that copies groups of layers to a peer."""

    source: torch.Tensor  # int64 words of the engine's arena
    peer: torch.Tensor  # int64 words
    numbers: torch.Tensor  # int32 [n] on the device: blocks of the prompt
    layers: int
    slab_words: int
    group: int  # layers that are announced together
    message: int  # layers of a launch
    copies: bool
    slowed_seconds: float = 0.0
    blocks: Sequence[BlockIndex] = ()
    _streams: list[torch.cuda.Stream] = field(default_factory=list)
    _parts: list[torch.Tensor] = field(default_factory=list)
    _launches: int = 0

    def __post_init__(self) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(_STREAMS)]
        pinned = torch.zeros(self.layers, len(self.numbers) * 64, dtype=torch.int64).pin_memory()
        self._parts = [view_pinned_words(row) for row in pinned]

    def ends_group(self, layer: int) -> bool:
        return (layer + 1) % self.group == 0 or layer + 1 == self.layers

    def on_launching(self) -> None: ...

    def on_launched(self, layer_ends: Sequence[DeviceEvent]) -> None: ...

    def __call__(self, layer: int) -> None:
        if not (self.copies and self.ends_group(layer)):
            return
        begin = layer // self.group * self.group
        for first in range(begin, layer + 1, self.message):
            self._copy(first, min(self.message, layer + 1 - first))

    def _copy(self, first: int, layers: int) -> None:
        words, block_words = layers * self.slab_words, self.layers * self.slab_words
        parts = count_checksum_parts(words)
        count = len(self.numbers)
        self._launches += 1
        with torch.cuda.stream(self._streams[self._launches % _STREAMS]):
            launch_slab_move(
                SlabPlaces(self.source, block_words, first * self.slab_words),
                SlabPlaces(self.peer, block_words, first * self.slab_words),
                self.numbers,
                self.numbers,
                words,
                ChecksumParts(self._parts[first][: count * parts].view(count, parts)),
            )


def measure(options: argparse.Namespace, folder: Path) -> str:
    model = MeasuredModel(folder, load_model_config(folder), "dummy")
    sizes = EngineSizes(max_model_len=2 * options.tokens, max_num_seqs=8, cache_bytes=4 << 30)
    loaded = LoadedEngine(model, "cuda", sizes)
    assert isinstance(loaded.engine, GpuEngine)
    layout = loaded.engine.layout
    size = loaded.num_blocks * layout.block_bytes
    owner = ArenaOwner(1 if torch.cuda.device_count() > 1 else 0, size)
    try:
        peer = view_device_words(CudaWorkDriver(0).open_memory(owner.handle), size)
        blocks = list(range(layout.count_blocks(options.tokens)))
        callbacks = [
            HandoffLaunches(
                loaded.engine.device_arena.view(-1).view(torch.int64),
                peer,
                torch.tensor(blocks, dtype=torch.int32, device="cuda"),
                layout.num_layers,
                layout.slab_bytes // 8,
                options.group,
                options.message,
                copies,
            )
            for copies in (False, True)
        ]
        alone, beside = time_prompts(loaded, callbacks, options.tokens, options.rounds)
    finally:
        owner.close()
    return (
        f"prompt of {options.tokens} tokens, median of {options.rounds}: {alone * 1e3:.2f} ms"
        f" without copies, {beside * 1e3:.2f} ms with them, {beside / alone:.3f} of it"
    )


def time_prompts(
    loaded: LoadedEngine, callbacks: Sequence[HandoffLaunches], tokens: int, rounds: int
) -> list[float]:
    """Median seconds of prompts with each callback, in turns."""
    seconds: list[list[float]] = [[] for _ in callbacks]
    for number in range(_WARM_UP + rounds):
        for callback, found in zip(callbacks, seconds, strict=True):
            chunk = loaded.make_chunk(tokens)
            torch.cuda.synchronize()
            started = time.perf_counter()
            loaded.engine.run(StepBatch((chunk,)), callback)
            if number >= _WARM_UP:
                found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt (2048)")
    parser.add_argument("--group", type=int, default=8, help="layers announced together (8)")
    parser.add_argument("--message", type=int, default=4, help="layers of a launch (4)")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="baton-bench-copies-") as scratch:
        folder = write_llama_folder(Path(scratch, "model"), LLAMA_CONFIGS["8b"])
        sys.stdout.write(measure(options, folder) + "\n")


if __name__ == "__main__":
    main()
