"""Measures steps of one engine, in a process of its own that runs as a node does.

Engines that share a process would share its thread pools, and disturb each other.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, get_args

from baton.models.model_identity import UNQUANTIZED, Quantization
from benchmarks.cpu.rates import MemoryReader, RateSizes, measure_product_rates
from benchmarks.device.engine_loads import EngineSizes, LoadedEngine, time_decode, time_prefill
from benchmarks.device.section_run import MeasuredModel
from benchmarks.device.step_bounds import list_layer_products
from kv_kernels.native.matrix import MatrixLayout
from kv_kernels.native.native_library import (
    NativeLibrary,
    NoNativeLibrary,
    load_library,
    open_library,
)
from kv_kernels.native.structures import Format
from node_engine.model.cpu.native_options import NativeOptions

_WARM_UP_TOKENS = 512
_TURN_STEPS = 4  # decode steps between two measurements of the read rate
_TURN_WARM_UP_STEPS = 1
_INT8, _NATIVE, _TORCH = "int8", "native", "torch"
_TYPICAL_WIDTH = 1024  # inputs of a matrix


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """One way to compute the steps of a model."""

    kernels: str  # native or torch
    dtype: str  # of the model, which quantization leaves for the rest
    quantization: str
    compact_weights: bool = False  # matrices take 12 bits a weight
    other_build: Path | None = None  # of the native kernels; None: the installed library

    @property
    def precision(self) -> str:
        """The precision of the products of layers."""
        return self.dtype if self.quantization == UNQUANTIZED else self.quantization

    @property
    def name(self) -> str:
        compact = "_compact" if self.compact_weights else ""
        build = "" if self.other_build is None else "_before"
        return f"{self.kernels}{build}/{short_name(self.precision)}{compact}"

    @property
    def compressed_fraction(self) -> float:
        """Size of the stored weights as a fraction of their size without compression."""
        if not self.compact_weights:
            return 1.0
        compact, plain = (
            MatrixLayout(_TYPICAL_WIDTH, _TYPICAL_WIDTH, stored).nbytes
            for stored in (Format.COMPACT_BFLOAT16, Format.BFLOAT16)
        )
        return compact / plain


def short_name(precision: str) -> str:
    """Return the name of a precision in figures."""
    return {"bfloat16": "bf16", "float32": "fp32"}.get(precision, precision)


def list_quantizations() -> list[str]:
    """Return the quantizations that a CPU computes in."""
    return [name for name in get_args(Quantization) if name in (UNQUANTIZED, _INT8)]


def supports_compact_weights(kernels: str, dtype: str, quantization: str) -> bool:
    """Whether an engine can compress its bfloat16 weights to 12 bits each."""
    return kernels == _NATIVE and dtype == "bfloat16" and quantization == UNQUANTIZED


def list_kernels() -> list[str]:
    """Return the kernels that engines on this CPU can choose, the default ones first."""
    return [_NATIVE, _TORCH] if isinstance(load_library(), NativeLibrary) else [_TORCH]


def open_build(other: Path | None) -> NativeLibrary:
    """Open another build of the native kernels, or the installed library if `other` is None.

    Raises ValueError if that cannot be loaded, or has another ABI version.
    """
    if other is not None and not other.is_file():
        raise ValueError(f"--before {other}: there is no such file")
    library = load_library() if other is None else open_library(other, folder=None)
    if isinstance(library, NoNativeLibrary):
        raise ValueError(f"native kernels cannot be measured: {library.reason}")
    return library


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Decode steps: one token of each sequence."""

    batch: int
    context: int  # tokens of each sequence, in the mean over the steps
    steps: int  # in one round

    @property
    def name(self) -> str:
        return f"decode_{self.batch}"

    @property
    def turns(self) -> int:
        """Calls of `time_case` in a round."""
        return -(-self.steps // _TURN_STEPS)


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A step that computes a whole prompt."""

    tokens: int
    turns: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return f"prefill_{self.tokens}"


EngineCase = DecodeCase | PrefillCase


@contextmanager
def start_worker() -> Iterator[Executor]:
    """Run one process, in which each call of the functions below takes its turn."""
    # As `baton up` sets it: threads that wait would spin on the cores of another engine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker:
        yield worker


class _Process:
    """What this process measures with."""

    loaded: LoadedEngine | None = None
    reader: MemoryReader | None = None


def load_engine(
    model: MeasuredModel, variant: EngineVariant, threads: int, cache_bytes: int
) -> None:
    """Load the engine that the next calls in this process measure."""
    options: dict[str, Any] = {"threads": threads, "quantize": variant.quantization}
    if variant.kernels == _NATIVE:
        library = open_build(variant.other_build)
        options["native"] = NativeOptions(library, compact_weights=variant.compact_weights)
    sizes = EngineSizes(max_batched_tokens=_WARM_UP_TOKENS, cache_bytes=cache_bytes)
    _Process.loaded = LoadedEngine(model, "cpu", sizes, **options)


def time_case(case: EngineCase) -> float:
    """Return the median seconds of a step in one turn."""
    loaded = _Process.loaded
    assert loaded is not None
    if isinstance(case, PrefillCase):
        return time_prefill(loaded, case.tokens, rounds=1, warm_up=0)
    steps = min(case.steps, _TURN_STEPS)
    return time_decode(loaded, case.batch, case.context, steps, warm_up=_TURN_WARM_UP_STEPS)


def measure_products(model: MeasuredModel, threads: int, sizes: RateSizes) -> dict[str, float]:
    """Measure what the cores reach at products, also at those of the model."""
    return measure_product_rates(threads, list_layer_products(model.config), sizes)


def measure_read_rate(threads: int, total_bytes: int) -> float:
    """Measure one pass over memory that is kept for the next call in this process."""
    _Process.reader = _Process.reader or MemoryReader(threads, total_bytes)
    return _Process.reader.measure_bandwidth()
