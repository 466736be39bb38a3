"""Section `fp8`: what 8-bit products and an engine that has them gain over bf16."""

import inspect
from collections.abc import Callable
from typing import Protocol

import torch

from baton.errors import BatonError
from benchmarks.device.engine_loads import EngineSizes, LoadedEngine, time_decode, time_prefill
from benchmarks.device.engine_steps import CASES, SIZES, EngineCases, name_decode, name_prefill
from benchmarks.device.limits import multiply_by_cublas, time_products
from benchmarks.device.section_run import SectionRun
from benchmarks.device.step_bounds import StepBounds, list_layer_products
from benchmarks.device.timing import Call
from kv_kernels.dispatch import kernels_for
from node_engine.model.model_loader import load_model_engine

_ROWS = (1, 8, 32, 2048)  # tokens of a step


class _Fp8Linear(Protocol):
    """A product that the engine has."""

    def quantize(self, x: torch.Tensor) -> object: ...
    def multiply(self, rows: object) -> torch.Tensor: ...


def measure(run: SectionRun, cases: EngineCases = CASES, sizes: EngineSizes = SIZES) -> None:
    """Measure the products alone, and then the steps of an engine."""
    make_linear = getattr(kernels_for(run.device), "make_fp8_linear", None)
    if make_linear is None:
        run.leave_out("products: this version has no fp8 kernels")
    else:
        with torch.inference_mode():
            _measure_products(run, make_linear)
    _measure_engine(run, cases, sizes)


def _measure_products(run: SectionRun, make_linear: Callable[[torch.Tensor], _Fp8Linear]) -> None:
    """The four products of a layer, with activations that are quantized already, and without."""

    def plan_product(weight: torch.Tensor, inputs: torch.Tensor) -> Call:
        layer = make_linear(weight)
        rows = layer.quantize(inputs)
        return lambda: layer.multiply(rows)

    def plan_whole(weight: torch.Tensor, inputs: torch.Tensor) -> Call:
        layer = make_linear(weight)
        return lambda: layer.multiply(layer.quantize(inputs))

    for tokens in _ROWS:
        run.require_time()
        plain, alone, whole = (
            sum(
                time_products(run.device, tokens, shape, plan)
                for shape in list_layer_products(run.model.config)
            )
            for plan in (multiply_by_cublas, plan_product, plan_whole)
        )
        note = f"{alone * 1e6:.1f} us a layer, bf16 {plain * 1e6:.1f} us"
        run.add_row(f"layer_products_{tokens}_of_bf16", plain / alone, "x", note=note)
        note = f"{whole * 1e6:.1f} us a layer"
        run.add_row(f"quantize_and_multiply_{tokens}_of_bf16", plain / whole, "x", note=note)


def _measure_engine(run: SectionRun, cases: EngineCases, sizes: EngineSizes) -> None:
    run.require_time()
    if "quantize" not in inspect.signature(load_model_engine).parameters:
        run.leave_out("steps: the engine of this version has no fp8")
        return
    try:
        loaded = LoadedEngine(run.model, run.device.type, sizes, quantize="fp8")
    except BatonError as error:
        run.leave_out(f"steps: the engine refuses fp8: {error}")
        return
    bounds = StepBounds(run.model.config, run.model.dtype, quantization="fp8")
    try:
        for batch, context in cases.decode:
            run.require_time()
            seconds = time_decode(loaded, batch, context, cases.steps)
            bound = bounds.bound_decode(batch, context, run.known_rates)
            run.add_time(name_decode(batch, context), seconds, bound)
            _compare_with_bf16(run, name_decode(batch, context), seconds)
        for tokens in cases.prefill:
            run.require_time()
            seconds = time_prefill(loaded, tokens)
            run.add_row(name_prefill(tokens), seconds * 1e3, "ms")
            _compare_with_bf16(run, name_prefill(tokens), seconds)
    finally:
        loaded.close()


def _compare_with_bf16(run: SectionRun, name: str, seconds: float) -> None:
    """Add how many times as fast the step is as the one of section `engine`, if that was run."""
    milliseconds = run.find_value(f"engine/{name}")
    if milliseconds is not None:
        run.add_row(f"{name}_of_bf16", milliseconds / 1e3 / seconds, "x")
