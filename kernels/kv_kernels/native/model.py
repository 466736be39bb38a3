"""A model in the native library: its threads, its cache and the step in progress."""

import ctypes
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_kernels.native.core_sharing import CoreSharingSlot
from kv_kernels.native.structures import (
    Format,
    KvnCache,
    KvnDraw,
    KvnLayer,
    KvnLinear,
    KvnModel,
    KvnStep,
    Status,
)

Ints = npt.NDArray[np.int64]
SLICE_FIELDS = 5  # first_row, num_rows, position, table_begin, table_length, as KvnSlice has them


class _StepArrays:
    """The arrays of a step, which have to live until its last call."""

    def __init__(
        self, token_ids: Ints, slices: Ints, block_tables: Ints, sampled_rows: Ints
    ) -> None:
        self._arrays = (token_ids, slices, block_tables, sampled_rows)
        self.structure = KvnStep(
            token_ids.ctypes.data,
            len(token_ids),
            slices.ctypes.data,
            len(slices),
            block_tables.ctypes.data,
            len(block_tables),
            sampled_rows.ctypes.data,
            len(sampled_rows),
        )


class NativeModel:
    """Computes steps over a bound cache. Not thread-safe; calls release Python's lock."""

    def __init__(
        self,
        functions: ctypes.CDLL,
        model: KvnModel,
        layers: Sequence[KvnLayer],
        threads: int,
        keep_alive: Sequence[Any],  # what the addresses in `model` and `layers` point to
    ) -> None:
        """Raises MemoryError if there is no memory or no thread left."""
        self._functions = functions
        self._vocab = model.vocab
        self._format = model.format
        self._keep_alive: list[Any] = list(keep_alive)
        array = (KvnLayer * len(layers))(*layers)
        model.layers = array
        self._context = functions.kvn_create(ctypes.byref(model), threads)
        if not self._context:
            raise MemoryError(f"no memory for a model on {threads} threads")
        self._num_halves = 2 * len(layers)
        self._keep_alive += [array, model]
        weakref.finalize(self, _destroy, functions, self._context, self._keep_alive, os.getpid())
        self._logits = torch.empty(0)
        self._step: _StepArrays | None = None

    @property
    def num_halves(self) -> int:
        """Two for each layer: the first ends when its KV is in the cache."""
        return self._num_halves

    def bind_cache(
        self,
        memory: torch.Tensor,  # contiguous: [blocks, layers, 2, kv_heads, block_size, row]
        num_blocks: int,
        block_size: int,
    ) -> None:
        """Use `memory` as cache. It has the model's dtype, or int8, with a scale in each row."""
        format_ = Format.INT8 if memory.dtype is torch.int8 else self._format
        cache = KvnCache(memory.data_ptr(), num_blocks, block_size, format_)
        self._functions.kvn_bind_cache(self._context, ctypes.byref(cache))
        self._keep_alive.append(memory)

    def share_cores(self, shared: CoreSharingSlot) -> None:
        """Use as many threads in a step as are its part of shared cores; called once at most.

        Raises ValueError for a slot that is none, and MemoryError.
        """
        status = self._functions.kvn_share_cores(
            self._context, shared.address, shared.slot, shared.cores
        )
        if status == Status.OUT_OF_MEMORY:
            raise MemoryError("no memory for sharing cores")
        if status:
            raise ValueError(f"slot {shared.slot} of {shared.cores} cores, or a second one")
        self._keep_alive.append(shared)

    def start_step(
        self,
        token_ids: Ints,  # [rows]
        slices: Ints,  # [slices, SLICE_FIELDS], which cover the rows in their order
        block_tables: Ints,  # of all slices, joined
        sampled_rows: Ints,  # ascending: rows computed to the end
    ) -> None:
        """Check a step and look up its tokens; `end_step` follows, also after a failure.

        Raises ValueError and MemoryError.
        """
        self._step = step = _StepArrays(token_ids, slices, block_tables, sampled_rows)
        status = self._functions.kvn_begin_step(self._context, ctypes.byref(step.structure))
        if status == Status.OUT_OF_MEMORY:
            raise MemoryError("no memory for the step's buffers")
        if status:
            raise ValueError("the step's slices, block tables or token ids are out of bounds")

    def end_step(self) -> None:
        """Leave the cores to other nodes."""
        self._functions.kvn_end_step(self._context)

    def run_halves(self, first: int, end: int) -> float:
        """Compute halves of layers, from `first` to before `end`.

        Returns the seconds from then until this thread had Python's lock again.
        """
        ended_ns = ctypes.c_int64()
        if self._functions.kvn_run_halves(self._context, first, end, ctypes.byref(ended_ns)):
            raise ValueError(f"halves {first} to {end} of {self._num_halves}")
        return (time.monotonic_ns() - ended_ns.value) * 1e-9

    def compute_logits(self, first: int, count: int) -> torch.Tensor:  # float32 [count, vocab]
        """Logits of sampled rows from `first` on; overwritten by the next call."""
        if self._logits.shape[0] < count:
            self._logits = torch.empty(count, self._vocab)
        logits = self._logits[:count]
        if self._functions.kvn_compute_logits(self._context, first, count, logits.data_ptr()):
            raise ValueError(f"rows {first} to {first + count} are not sampled")
        return logits

    def pick_tokens(
        self,
        logits: torch.Tensor,  # [rows, vocab], overwritten
        draws: Sequence[KvnDraw],  # one per row
    ) -> list[int]:
        """Draw a token per row: -1 where the greatest logit is not finite. Raises MemoryError."""
        rows = logits.float().contiguous()
        tokens = (ctypes.c_int64 * len(draws))()
        status = self._functions.kvn_pick_tokens(
            self._context, rows.data_ptr(), len(draws), (KvnDraw * len(draws))(*draws), tokens
        )
        if status:
            raise MemoryError(f"no memory to draw {len(draws)} tokens")
        return list(tokens)

    def multiply(
        self,
        linear: KvnLinear,
        x: torch.Tensor,  # [rows, inputs], in the model's format
    ) -> torch.Tensor:  # float32 [rows, outputs]
        """One product as forward passes compute it, for tests and measurements."""
        out = torch.empty(len(x), linear.outputs)
        rows = x.contiguous()
        status = self._functions.kvn_multiply(
            self._context, ctypes.byref(linear), rows.data_ptr(), len(rows), out.data_ptr()
        )
        if status:
            raise MemoryError(f"no memory for a product of {len(x)} rows")
        return out


def _destroy(
    functions: ctypes.CDLL, context: int, keep_alive: Sequence[Any], creator_pid: int
) -> None:
    # A forked process has none of the threads, and its slot for sharing cores is its parent's.
    if os.getpid() == creator_pid:
        functions.kvn_destroy(context)
