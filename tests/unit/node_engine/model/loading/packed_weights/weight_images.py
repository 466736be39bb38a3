"""Small packed models, and processes that use them."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from node_engine.model.loading.packed_weights.cache_folder import WeightCacheFolder
from node_engine.model.loading.packed_weights.image_layout import (
    ImageLayout,
    PackedWeightsKey,
    RegionSpec,
    plan_image,
)
from node_engine.model.loading.packed_weights.store import PackedWeights, PackedWeightStore

KEY = PackedWeightsKey("ab" * 32, "rows", 1, "avx512", "bfloat16", "none")
SPECS = (
    RegionSpec("embedding", 3 << 20),
    RegionSpec("norm", 100),
    RegionSpec("nothing", 0),
    RegionSpec("layer.0", (1 << 20) + 1, 4096),
)
LAYOUT = plan_image(KEY, SPECS)
CACHE_BYTES = 1 << 30

_SCRIPT = """
import os, sys
from pathlib import Path
from tests.unit.node_engine.model.loading.packed_weights import weight_images as images

def fill(name, memory):
    print("fill", name, flush=True)
    if sys.argv[3] == name:
        sys.stdin.readline()
    images.fill_region(name, memory)

cache = images.open_cache(Path(sys.argv[2])) if sys.argv[2] else None
store = images.PackedWeightStore(Path(sys.argv[1]), cache, patience_seconds=float(sys.argv[4]))
weights = store.open_or_build(images.KEY, images.SPECS, fill)
print("result", weights.source, weights.is_shared, images.has_right_bytes(weights), flush=True)
sys.stdin.read()
"""


def region_bytes(name: str, size: int) -> bytes:
    return (name.encode() * (size // len(name) + 1))[:size]


def fill_region(name: str, memory: memoryview) -> None:
    memory[:] = region_bytes(name, len(memory))


def refuse_to_fill(name: str, memory: memoryview) -> None:
    raise AssertionError(f"{name} is packed, and should have been found")


def has_right_bytes(weights: PackedWeights, specs: Sequence[RegionSpec] = SPECS) -> bool:
    return all(
        weights.regions[spec.name].view == region_bytes(spec.name, spec.size_bytes)
        for spec in specs
    )


def open_cache(folder: Path, max_bytes: int = CACHE_BYTES) -> WeightCacheFolder:
    return WeightCacheFolder(folder, max_bytes)


def pack_into_cache(segments: Path, cache: WeightCacheFolder) -> Path:
    """Pack the model, write its cache file, release the segment. Returns the file."""
    weights = PackedWeightStore(segments, cache).open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"
    assert weights.cache_writer is not None
    weights.cache_writer.join()
    return cache.image_path(LAYOUT)


def segment_path(folder: Path, layout: ImageLayout = LAYOUT) -> Path:
    return folder / f"baton-weights-{layout.image_id}"


def make_key_of_model(model: int) -> PackedWeightsKey:
    return msgspec.structs.replace(KEY, model_digest=f"{model:064x}")


@contextmanager
def run_user(
    segments: Path,
    cache: Path | None = None,
    stop_at: str = "",
    patience_seconds: float = 300.0,
) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that packs or finds the model, and uses it until its input ends.

    It prints `fill NAME` before each region, waits for a line before it fills `stop_at`, and prints
    `result SOURCE SHARED RIGHT` when it is ready.
    """
    arguments = [str(segments), str(cache or ""), stop_at, str(patience_seconds)]
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """Return the next line of the process, or of its log, with this text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line.strip()
    raise AssertionError(f"the process ended without {text!r}")


def send_line(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
