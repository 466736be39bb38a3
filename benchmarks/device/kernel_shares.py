"""Section `kernels`: the kernels of a step, as shares of the limits of this run.

Kernels that only move values are measured with more values than the caches hold.
"""

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.device import triton_calls
from benchmarks.device.section_run import SectionRun
from benchmarks.device.timing import Call, capture_calls, median_seconds
from benchmarks.device.triton_calls import AttentionSizes
from kv_kernels.dispatch import kernels_for
from kv_kernels.triton import layer_ops
from kv_kernels.triton.block_copy import copy_blocks_between
from kv_kernels.triton.sampling import SamplingRows, sample_rows


@dataclass(frozen=True, slots=True)
class KernelCases:
    """The sizes that are measured."""

    decode: tuple[tuple[int, int], ...] = ((1, 2048), (64, 2048), (256, 512))  # batch, context
    prefill: tuple[int, ...] = (2048, 8192)  # tokens
    small_rows: int = 64  # tokens of a decode step: the time of one launch
    large_rows: int = 16384  # tokens whose values no cache holds
    sampled_rows: tuple[int, ...] = (1, 32, 64)
    copied_bytes: int = 256 << 20
    launches: int = 20  # of a small kernel in one graph
    rounds: int = 20  # of which the median counts


_CASES = KernelCases()
_SAMPLING_METHODS = {
    "greedy": (0.0, 1.0, 0),
    "top_p": (1.0, 0.9, 0),
    "top_k": (1.0, 1.0, 50),
}  # temperature, top_p, top_k


def measure(
    run: SectionRun, cases: KernelCases = _CASES, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Measure all kernels."""
    config = run.model.config
    sizes = AttentionSizes(config.num_heads, config.num_kv_heads, config.head_dim, dtype=dtype)
    section = _KernelSection(run, sizes, cases)
    with torch.inference_mode():
        section.measure_attention()
        section.measure_layer_operations()
        section.measure_sampling()
        section.measure_block_copies()


@dataclass(frozen=True, slots=True)
class _KernelSection:
    run: SectionRun
    sizes: AttentionSizes
    cases: KernelCases

    def measure_attention(self) -> None:
        rates, device = self.run.known_rates, self.run.device
        for batch, context in self.cases.decode:
            self.run.require_time()
            call = triton_calls.plan_decode(self.sizes, device, batch, context)
            seconds = self._time(capture_calls(call, device))
            rate = batch * context * self.sizes.kv_token_bytes / seconds
            name = f"decode_attention_{batch}_of_{context}"
            self.run.add_row(name, rate / 1e9, "GB/s", rates.read_bytes / 1e9)
        for tokens in self.cases.prefill:
            self.run.require_time()
            call = triton_calls.plan_prefill(self.sizes, device, tokens)
            operations = triton_calls.count_prefill_operations(self.sizes, tokens)
            rate = operations / self._time(call)
            name = f"prefill_attention_{tokens}"
            self.run.add_row(name, rate / 1e12, "TFLOP/s", rates.products / 1e12)

    def measure_layer_operations(self) -> None:
        """Norm, activation and rotation: bytes are those that are read and written."""
        config = self.run.model.config
        make_values, device = self.sizes.make_values, self.run.device
        item = self.sizes.dtype.itemsize
        hidden, inner = config.hidden_size, config.intermediate_size
        weight = make_values(device, hidden)

        def plan_norm(rows: int) -> Call:
            x, residual = make_values(device, rows, hidden), make_values(device, rows, hidden)
            return lambda: layer_ops.add_rms_norm(x, residual, weight, 1e-5)

        def plan_silu(rows: int) -> Call:
            gate_up = make_values(device, rows, 2 * inner)
            return lambda: layer_ops.silu_mul(gate_up)

        def plan_rotation(rows: int) -> Call:
            return triton_calls.plan_rotate_and_write(self.sizes, device, rows)

        rotated = triton_calls.count_rotated_bytes(self.sizes, 1)
        self._measure_rows("add_rms_norm", plan_norm, 4 * hidden * item)
        self._measure_rows("silu_mul", plan_silu, 3 * inner * item)
        self._measure_rows("rotate_and_write", plan_rotation, rotated)

    def _measure_rows(self, name: str, plan: Callable[[int], Call], row_bytes: int) -> None:
        """The time of a decode step's launch, and the rate over many rows."""
        device, cases = self.run.device, self.cases
        self.run.require_time()
        rows = cases.small_rows
        call = capture_calls(plan(rows), device, cases.launches)
        seconds = self._time(call) / cases.launches
        self.run.add_row(f"{name}_{rows}", seconds * 1e6, "us")
        rows = cases.large_rows
        rate = rows * row_bytes / self._time(capture_calls(plan(rows), device))
        limit = self.run.known_rates.read_bytes / 1e9
        self.run.add_row(f"{name}_{rows}", rate / 1e9, "GB/s", limit)

    def measure_sampling(self) -> None:
        device, vocabulary = self.run.device, self.run.model.config.vocab_size
        for rows in self.cases.sampled_rows:
            logits = self.sizes.make_values(device, rows, vocabulary)
            for name, method in _SAMPLING_METHODS.items():
                self.run.require_time()
                call = _plan_sampling(logits, *method)
                seconds = self._time(capture_calls(call, device))
                note = f"{vocabulary} logits a row, normally distributed"
                self.run.add_row(f"sampling_{name}_{rows}", seconds * 1e6, "us", note=note)

    def measure_block_copies(self) -> None:
        """Copies of scattered blocks between the arena in host memory and the one of the device."""
        run, sizes, rates = self.run, self.sizes, self.run.known_rates
        block = (run.model.config.num_layers, 2, sizes.kv_heads, sizes.block_size, sizes.dim)
        block_bytes = math.prod(block) * sizes.dtype.itemsize
        count = max(1, self.cases.copied_bytes // block_bytes)
        host = _allocate_pinned(2 * count * block_bytes, sizes.dtype, run.device).view(-1, *block)
        arena = torch.zeros_like(host)
        blocks = torch.randperm(2 * count)[:count].to(run.device, torch.int32)
        for name, source, target, limit in (
            ("blocks_to_device", host, arena, rates.to_device_bytes),
            ("blocks_to_host", arena, host, rates.to_host_bytes),
        ):
            run.require_time()
            call = _plan_copy(source, target, blocks)
            rate = count * block_bytes / self._time(call)
            run.add_row(name, rate / 1e9, "GB/s", limit / 1e9)

    def _time(self, call: Call) -> float:
        return median_seconds(call, self.run.device, self.cases.rounds)


def _plan_copy(source: torch.Tensor, target: torch.Tensor, blocks: torch.Tensor) -> Call:
    return lambda: copy_blocks_between(source, target, blocks)


def _plan_sampling(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> Call:
    """Sampling of a token for each row, all with the same parameters."""
    rows, device = len(logits), logits.device

    def fill(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    sampling = SamplingRows(
        temperature=fill(temperature, torch.float32),
        log_min_p=fill(-math.inf, torch.float32),
        top_k=fill(top_k, torch.int32),
        top_p=fill(top_p, torch.float32),
        seed=torch.arange(rows, dtype=torch.int64, device=device),
        position=fill(7, torch.int32),
        choice=fill(0, torch.int32),
    )
    return lambda: sample_rows(logits, sampling)


def _allocate_pinned(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that the kernels of the device read and write, as a node's arena."""
    memory = memoryview(mmap.mmap(-1, size))
    return kernels_for(device).memory_as_tensor(memory, dtype)
