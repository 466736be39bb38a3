"""NativeEngine: runs a model with the native kernels, in the host's cache memory."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from baton.errors import OutOfMemory
from baton.kv.blocks import KVLayout
from baton.models.model_identity import Quantization
from kv_kernels.native.model import SLICE_FIELDS, Ints, NativeModel
from kv_kernels.native.structures import KvnDraw
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import LayerCallback
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceSlice,
    SliceResult,
    StepBatch,
    gather_slice_results,
    list_sampled_rows,
)
from node_engine.model.common.base_engine import score_prompt_rows, translate_device_errors
from node_engine.model.common.host_memory_engine import HostMemoryEngine
from node_engine.model.common.warm_up import list_mixed_warm_up_steps
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.sampling.philox import WORD_MASK
from node_engine.model.sampling.sampler import damaged_logits_error, sample_tokens

_SEED_MASK = (1 << 64) - 1


class NativeEngine(HostMemoryEngine):
    """An `Engine` over one native model and one arena. Not thread-safe: compute thread only."""

    def __init__(
        self,
        config: ModelConfig,
        model: NativeModel,
        layout: KVLayout,
        max_model_len: int,
        digest: bytes,
        quantization: Quantization,
        dtype: str,  # of the arithmetic
    ) -> None:
        super().__init__(
            config,
            TorchKernels(),
            layout,
            torch.device("cpu"),
            max_model_len,
            digest,
            quantization=quantization,
            dtype=dtype,
        )
        self._model = model
        self._arena: torch.Tensor | None = None

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory; see Engine.bind_cache.

        Raises ValueError if it is read-only, too short or not whole blocks.
        """
        memory = self._wrap_host_memory(arena, num_blocks, may_be_longer=True)
        self._model.bind_cache(memory, len(memory), self._layout.block_size)
        self._arena = memory
        self._num_blocks = num_blocks

    def _iter_warm_up_steps(self, max_batched_tokens: int) -> list[StepBatch]:
        """No kernel is compiled, packed or loaded at its first use."""
        return list_mixed_warm_up_steps(
            self._layout.block_size, self._num_blocks, self._max_model_len
        )

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """Run one forward pass; see Engine.run.

        Raises OutOfMemory, and NodeFailed if logits are not finite.
        """
        if self._arena is None:
            raise RuntimeError("run() before bind_cache()")
        with torch.inference_mode(), translate_device_errors():
            if batch.block_copies:
                source, target = torch.tensor(batch.block_copies).unbind(1)
                self._arena[target] = self._arena[source]  # all are read before one is written
            if not batch.slices:
                return ()
            try:
                self._run_forward(batch, on_layer)
                return self._collect_results(batch)
            finally:
                self._model.end_step()

    def _run_forward(self, batch: StepBatch, on_layer: LayerCallback | None) -> None:
        model = self._model
        try:
            model.start_step(*build_step_arrays(batch.slices, self._layout.block_size))
        except MemoryError as error:
            raise OutOfMemory(
                f"no memory left for this step: {error}: lower --max-batched-tokens"
            ) from error
        first = 0
        if on_layer is not None:
            for layer in range(self._layout.num_layers):
                on_layer.slowed_seconds += model.run_halves(first, 2 * layer + 1)
                on_layer(layer)
                first = 2 * layer + 1
        model.run_halves(first, model.num_halves)

    def _collect_results(self, batch: StepBatch) -> tuple[SliceResult, ...]:
        """Sample the tokens and score the prompts that the slices ask for."""
        slices, sampled = batch.slices, list[SliceResult]()
        rows, specs = list_sampled_rows(slices)
        scored = [i for i, slice_ in enumerate(slices) if slice_.logprobs_spec is not None]
        ends = list(accumulate(len(slice_.token_ids) for slice_ in slices))
        if rows:
            # Without prompts to score, the rows drawn from are all that were computed to the end.
            logits = (
                self._gather_logits(rows) if scored else self._model.compute_logits(0, len(rows))
            )
            sampled = sample_tokens(logits, specs, self._pick_tokens)
        results = gather_slice_results(slices, sampled)
        for index in scored:
            wanted = slices[index].logprobs_spec
            assert wanted is not None
            first = ends[index] - len(slices[index].token_ids)
            scores = score_prompt_rows(
                partial(self._compute_logits, first), wanted, self.vocab_size
            )
            results[index] = results[index]._replace(prompt_logprobs=scores)
        return tuple(results)

    def _pick_tokens(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        tokens = self._model.pick_tokens(logits, [describe_draw(spec) for spec in specs])
        if -1 in tokens:
            raise damaged_logits_error()
        return tokens

    def _compute_logits(self, offset: int, first: int, count: int) -> torch.Tensor:
        return self._model.compute_logits(offset + first, count)

    def _gather_logits(self, rows: Sequence[int]) -> torch.Tensor:  # [rows, vocab]
        return torch.cat([self._model.compute_logits(row, 1).clone() for row in rows])


def describe_draw(spec: SampleSpec) -> KvnDraw:
    """How the native kernels draw a token."""
    params = spec.params
    return KvnDraw(
        top_p=params.top_p,
        seed=params.seed & _SEED_MASK,
        top_k=params.top_k,
        temperature=params.temperature,
        min_logit=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        position=spec.position & WORD_MASK,
        choice=spec.choice_index & WORD_MASK,
    )


def build_step_arrays(
    slices: Sequence[SequenceSlice], block_size: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Token ids, slices, block tables and sampled rows, as `NativeModel.start_step` takes them.

    Raises ValueError for an empty slice or a block table that is too short.
    """
    described = np.empty((len(slices), SLICE_FIELDS), np.int64)
    tables: list[int] = []
    token_ids: list[int] = []
    is_scored = any(slice_.logprobs_spec is not None for slice_ in slices)
    for index, slice_ in enumerate(slices):
        count = len(slice_.token_ids)
        length = slice_.start + count
        entries = -(-length // block_size)
        if not count or len(slice_.block_table) < entries:
            raise ValueError(
                f"sequence {slice_.sequence_id}: {count} tokens from position {slice_.start} in"
                f" {len(slice_.block_table)} blocks of {block_size}"
            )
        described[index] = (len(token_ids), count, slice_.start, len(tables), entries)
        tables += slice_.block_table[:entries]
        token_ids += slice_.token_ids
    rows = range(len(token_ids)) if is_scored else list_sampled_rows(slices)[0]
    return (
        np.array(token_ids, np.int64),
        described,
        np.array(tables, np.int64),
        np.array(rows, np.int64),
    )
