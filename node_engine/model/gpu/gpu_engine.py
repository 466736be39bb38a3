"""GpuEngine: runs a model on an NVIDIA GPU, with the KV cache in device memory."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import torch

from baton.kv.blocks import KVLayout
from baton.types import BlockIndex
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import CacheLimits, LayerCallback
from node_engine.core.step.step_batch import SequenceSlice, SliceResult, StepBatch
from node_engine.model.common.base_engine import (
    BaseEngine,
    logits_by_row,
    score_prompt_rows,
    translate_device_errors,
)
from node_engine.model.common.warm_up import GPU_PROMPT_LENGTHS, iter_warm_up_steps
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.gpu.device_cache import DeviceCache, copy_numbers_to_device
from node_engine.model.gpu.draws import read_draws, require_finite
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.run_ahead import StepPrediction
from node_engine.model.gpu.step_inputs import StepInputsBuilder
from node_engine.model.gpu.step_launcher import LaunchedStep, StepLauncher
from node_engine.model.gpu.step_slowdown import StepSlowdown


@dataclass(slots=True)
class _StepAhead:
    """A step that was launched before the scheduler asked for it."""

    prediction: StepPrediction
    launched: LaunchedStep
    previous_tokens: Sequence[int] = ()  # that the step before it has drawn

    def find_draws(self, slices: Sequence[SequenceSlice]) -> dict[int, int]:
        """The draw of each slice that this step computes, by the slice's index."""
        draws = self.launched.draw_by_slice
        places = self.prediction.find_places(slices, self.previous_tokens)
        return {index: draws[place] for index, place in places.items()}


class GpuEngine(BaseEngine):
    """An `Engine` over one model and one device arena. Not thread-safe: compute thread only."""

    def __init__(
        self,
        config: ModelConfig,
        model: FusedTransformer,
        kernels: TorchKernels,
        layout: KVLayout,
        device: torch.device,
        max_model_len: int,
        digest: bytes,
        *,
        max_graph_rows: int,
    ) -> None:
        """`max_graph_rows`: sequences of the largest decode step that is captured; 0 for none."""
        super().__init__(
            config, kernels, layout, device, max_model_len, digest, quantization=model.quantization
        )
        self._model = model
        self._max_graph_rows = max_graph_rows
        self._memory: DeviceCache | None = None
        self._launcher: StepLauncher | None = None
        self._ahead: _StepAhead | None = None

    @property
    def cache_limits(self) -> CacheLimits:
        """The pool is in host memory, which the GPU's kernels do not read."""
        return CacheLimits(
            reads_pool_in_place=False,
            lookahead_tokens=1 if self._max_graph_rows else 0,
        )

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Allocate the device arena, and pin `arena`, its copy in the host; see Engine.bind_cache.

        Raises ValueError if `arena` is read-only, too short or not whole blocks; ConfigError if the
        GPU cannot use it or has too little free memory; and DeviceLost if the GPU has failed.
        """
        self._launcher = self._memory = self._ahead = None
        host = self._wrap_host_memory(arena, num_blocks, may_be_longer=False)
        with translate_device_errors():
            self._memory = DeviceCache(host[:num_blocks])
        builder = StepInputsBuilder(self._layout.block_size, self._memory.scratch_block)
        self._launcher = StepLauncher(self._model, self._memory.cache, builder)

    @property
    def device_arena(self) -> torch.Tensor:
        """[blocks, layers, 2, kv_heads, block_size, dim], with at least one block more than the
        cache has. Raises RuntimeError before `bind_cache`."""
        return self._bound_memory.cache.arena

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """See Engine.load_blocks. The next step begins the copies."""
        self._bound_memory.mark_host_written(blocks)

    def void_loads(self, blocks: Sequence[int]) -> None:
        """Let no earlier `load_blocks` change these blocks, which a peer writes on the device.

        What has begun already ends before what is launched from now on. Raises DeviceLost.
        """
        with translate_device_errors():
            self._bound_memory.void_loads(blocks)

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]:
        """See Engine.save_blocks."""
        with torch.inference_mode(), translate_device_errors():
            return self._bound_memory.save_blocks(blocks)

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run steps of typical sizes and capture graphs; see Engine.warm_up."""
        memory, launcher = self._bound_memory, self._bound_launcher
        cache = self._layout.block_size, memory.num_blocks
        for step in iter_warm_up_steps(
            GPU_PROMPT_LENGTHS, *cache, self._max_model_len, max_batched_tokens
        ):
            if not is_wanted():
                return
            self.run(step)
        self._ahead = None
        if self._max_graph_rows:
            tables = self._max_graph_rows * self._layout.count_blocks(self._max_model_len)
            with translate_device_errors():
                launcher.capture_graphs(self._max_graph_rows, tables, max_batched_tokens, is_wanted)

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """Run one forward pass; see Engine.run.

        Raises OutOfMemory, NodeFailed if logits are not finite, and DeviceLost if the GPU failed.
        """
        memory = self._bound_memory
        with torch.inference_mode(), translate_device_errors():
            memory.load_marked_blocks()
            unloaded = memory.find_unloaded_slices(batch.slices)
            if len(unloaded) == len(batch.slices) or on_layer is not None or batch.block_copies:
                memory.wait_for_loads()
                unloaded = set()
            if batch.block_copies:
                copies = copy_numbers_to_device(batch.block_copies, torch.int64, self._device)
                self._kernels.copy_blocks(memory.cache.arena, *copies.unbind(1))
            if unloaded:
                return self._run_others(batch, unloaded)
            if not batch.slices:
                return ()
            if on_layer is not None:
                return self._run_for_callback(batch, on_layer)
            return self._run_with_prediction(batch)

    def _run_others(self, batch: StepBatch, deferred: set[int]) -> tuple[SliceResult, ...]:
        """Run the slices that need not be deferred."""
        computed = [i for i in range(len(batch.slices)) if i not in deferred]
        results = [SliceResult(is_deferred=True)] * len(batch.slices)
        others = StepBatch(tuple(batch.slices[i] for i in computed))
        for index, result in zip(computed, self._run_with_prediction(others), strict=True):
            results[index] = result
        return tuple(results)

    def _run_for_callback(
        self, batch: StepBatch, on_layer: LayerCallback
    ) -> tuple[SliceResult, ...]:
        """Run a step whose layers are read by others as they are computed."""
        self._ahead = None
        slowdown = StepSlowdown(on_layer)
        reporter = self._bound_memory.report_layers(on_layer, slowdown.report_layer)
        with reporter.finished_at_exit():
            launched = self._bound_launcher.launch(batch, on_written=reporter.on_layer_written)
            slowdown.end_launch()
            reporter.end_launch()
        slowdown.end_step(reporter.measure_copy_wait())
        return self._read_results(batch, launched)

    def _run_with_prediction(self, batch: StepBatch) -> tuple[SliceResult, ...]:
        """Take what the last call has launched ahead; slices that are not part of it wait."""
        ahead, self._ahead = self._ahead, None
        draws = {} if ahead is None else ahead.find_draws(batch.slices)
        if ahead is None or not draws:
            launched = self._bound_launcher.launch(batch)
            self._launch_ahead(batch.slices, launched.draw_by_slice)
            return self._read_results(batch, launched)
        self._launch_ahead(batch.slices, draws)
        tokens = self._read_tokens(ahead.launched)
        deferred = SliceResult(is_deferred=True)
        return tuple(
            SliceResult(require_finite(tokens[draws[i]])) if i in draws else deferred
            for i in range(len(batch.slices))
        )

    def _launch_ahead(
        self, slices: Sequence[SequenceSlice], draw_by_slice: Mapping[int, int]
    ) -> None:
        """Launch the step that follows if no sequence ends; see StepPrediction.predict."""
        if not self._max_graph_rows:
            return
        prediction = StepPrediction.predict(
            slices, draw_by_slice, self._layout.block_size, self._max_model_len
        )
        if prediction is None:
            return
        # Without memory for it, the step is launched when the scheduler asks for it.
        with suppress(torch.OutOfMemoryError):
            launched = self._bound_launcher.launch(prediction.batch, continues=True)
            self._ahead = _StepAhead(prediction, launched)

    def _read_tokens(self, launched: LaunchedStep) -> list[int]:
        tokens = launched.read_tokens()
        if self._ahead is not None:
            self._ahead.previous_tokens = tokens
        return tokens

    def _read_results(self, batch: StepBatch, launched: LaunchedStep) -> tuple[SliceResult, ...]:
        """Wait for the step and read its results."""
        results = [SliceResult()] * len(batch.slices)
        tokens = self._read_tokens(launched)
        if launched.logits is not None:
            drawn = read_draws(launched.inputs, launched.logits, tokens)
            for index, result in zip(launched.inputs.drawn_slice_indices, drawn, strict=True):
                results[index] = result
        if launched.hidden is not None:
            for rows in launched.inputs.scored_rows:
                scores = score_prompt_rows(
                    logits_by_row(self._model.compute_logits, launched.hidden[rows.first_row :]),
                    rows.logprobs_spec,
                    self.vocab_size,
                )
                index = rows.slice_index
                results[index] = results[index]._replace(prompt_logprobs=scores)
        return tuple(results)

    @property
    def _bound_memory(self) -> DeviceCache:
        if self._memory is None:
            raise RuntimeError("bind_cache() has not been called")
        return self._memory

    @property
    def _bound_launcher(self) -> StepLauncher:
        if self._launcher is None:
            raise RuntimeError("bind_cache() has not been called")
        return self._launcher
