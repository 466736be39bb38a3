"""Section `limits`: what the device reaches at one thing alone; all shares refer to these."""

import time
from collections.abc import Callable

import torch

from benchmarks.device.section_run import SectionRun
from benchmarks.device.step_bounds import DeviceRates, ProductShape, list_layer_products
from benchmarks.device.timing import Call, capture_calls, median_seconds, time_rounds

_READ_BYTES = 2 << 30  # far beyond the caches
_LINK_BYTES = 256 << 20
_MATRIX_SIZE = 8192
_ROWS = (1, 8, 32, 128, 512, 2048)  # tokens of a step
_COMPUTE_BOUND_ROWS = 512  # from so many rows on, products are bound by arithmetic
_CACHED_BYTES = 256 << 20  # of weights that are multiplied in turn, so that no cache has them
_MOST_WEIGHTS = 64  # of a small model, whose weights a cache holds anyway
_LAUNCHES = 2000


def measure(run: SectionRun) -> None:
    """Measure the products of the model's layers, and launches; `measure_rates` ran before."""
    with torch.inference_mode():
        _measure_layer_products(run)
        _measure_launches(run)


def measure_rates(run: SectionRun) -> None:
    """Measure the rates that the other sections refer to: a few seconds."""
    device = run.device
    _describe_device(run)
    with torch.inference_mode():
        rates = DeviceRates(
            read_bytes=_measure_read_rate(device),
            products=_measure_product_rate(device),
            to_device_bytes=_measure_link_rate(device, to_device=True),
            to_host_bytes=_measure_link_rate(device, to_device=False),
        )
    run.rates = rates
    run.add_row("read", rates.read_bytes / 1e9, "GB/s", note="best of 20")
    run.add_row("products", rates.products / 1e12, "TFLOP/s", note=f"bf16, {_MATRIX_SIZE} cubed")
    run.add_row("host_to_device", rates.to_device_bytes / 1e9, "GB/s", note="pinned")
    run.add_row("device_to_host", rates.to_host_bytes / 1e9, "GB/s", note="pinned")


def _describe_device(run: SectionRun) -> None:
    import triton

    properties = torch.cuda.get_device_properties(run.device)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"
    note = f"{properties.name}, {properties.multi_processor_count} multiprocessors, {versions}"
    run.add_row("memory", properties.total_memory / 1e9, "GB", note=note)


def _measure_read_rate(device: torch.device) -> float:
    """Bytes per second of a sum over more memory than the caches hold, best of several."""
    source = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    return source.nbytes / min(time_rounds(source.sum, device))


def _measure_product_rate(device: torch.device) -> float:
    """Operations per second of a product of large bf16 matrices."""
    left, right = (_make_bf16(device, _MATRIX_SIZE, _MATRIX_SIZE) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * _MATRIX_SIZE**3 / median_seconds(lambda: torch.mm(left, right, out=out), device)


def _measure_link_rate(device: torch.device, *, to_device: bool) -> float:
    """Bytes per second of copies between pinned host memory and the device, best of several."""
    host = torch.zeros(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    memory = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device)
    target, source = (memory, host) if to_device else (host, memory)
    rounds = time_rounds(lambda: target.copy_(source, non_blocking=True), device, rounds=8)
    return _LINK_BYTES / min(rounds)


def _measure_layer_products(run: SectionRun) -> None:
    """The four products of a layer by cuBLAS, at the rows of decode steps and of chunks."""
    rates, products = run.known_rates, list_layer_products(run.model.config)
    elements = sum(product.elements for product in products)
    for rows in _ROWS:
        run.require_time()
        seconds = sum(time_products(run.device, rows, product) for product in products)
        if rows >= _COMPUTE_BOUND_ROWS:
            rate, limit, unit = 2 * rows * elements / seconds, rates.products, "TFLOP/s"
            scale = 1e12
        else:
            rate, limit, unit = 2 * elements / seconds, rates.read_bytes, "GB/s"
            scale = 1e9
        note = f"{seconds * 1e6:.1f} us for the four products of a layer"
        run.add_row(f"layer_products_{rows}", rate / scale, unit, limit / scale, note)


def multiply_by_cublas(weight: torch.Tensor, inputs: torch.Tensor) -> Call:
    """The product of inputs [tokens, columns] with a weight [rows, columns] by torch."""
    return lambda: torch.nn.functional.linear(inputs, weight)


def time_products(
    device: torch.device,
    tokens: int,
    shape: ProductShape,
    plan_product: Callable[[torch.Tensor, torch.Tensor], Call] = multiply_by_cublas,
) -> float:
    """Seconds of the product of `tokens` rows with a bf16 weight.

    Weights take turns, so that none is in a cache.
    """
    count = min(_MOST_WEIGHTS, max(1, _CACHED_BYTES // (2 * shape.elements)))
    inputs = _make_bf16(device, tokens, shape.columns)
    calls = [
        plan_product(_make_bf16(device, shape.rows, shape.columns), inputs) for _ in range(count)
    ]
    call = capture_calls(lambda: [each() for each in calls], device)
    return median_seconds(call, device) / count


def _make_bf16(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


def _measure_launches(run: SectionRun) -> None:
    """The cost of a launch for the process, and of waiting for an idle device."""
    run.require_time()
    values = torch.zeros(8, device=run.device)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_LAUNCHES):
        values.add_(1)
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_LAUNCHES):
        values.add_(1)
        torch.cuda.synchronize()
    waited = time.perf_counter() - started
    run.add_row("launch", launched / _LAUNCHES * 1e6, "us", note="by torch, one small kernel")
    run.add_row("launch_and_wait", waited / _LAUNCHES * 1e6, "us")
