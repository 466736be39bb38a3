"""GpuEngine: runs a model on an NVIDIA GPU, with the KV cache in device memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from baton.kv.blocks import KVLayout
from baton.types import BlockIndex
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import CacheLimits, LayerCallback
from node_engine.core.step.step_batch import SequenceSlice, SliceResult, StepBatch
from node_engine.model.common.base_engine import (
    BaseEngine,
    score_prompt_rows,
    translate_device_errors,
)
from node_engine.model.common.warm_up import GPU_PROMPT_LENGTHS, iter_warm_up_steps
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.gpu.decode_graphs import (
    DecodeGraphs,
    LaunchedStep,
    capture_decode_graphs,
)
from node_engine.model.gpu.device_cache import DeviceCache
from node_engine.model.gpu.draws import StepOutput, draw_tokens, read_draws, require_finite
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.layer_graphs import BucketedLayerGraphs, capture_layer_graphs
from node_engine.model.gpu.run_ahead import StepPrediction, is_decode_slice
from node_engine.model.gpu.step_inputs import DeviceInputs, StepInputs, StepInputsBuilder


@dataclass(slots=True)
class _StepAhead:
    """A step that was launched before the scheduler asked for it."""

    prediction: StepPrediction
    launched: LaunchedStep
    previous_tokens: Sequence[int] = ()  # of the step before it, by row

    def find_rows(self, slices: Sequence[SequenceSlice]) -> dict[int, int]:
        return self.prediction.find_rows(slices, self.previous_tokens)


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
        self._inputs_builder: StepInputsBuilder | None = None
        self._graphs: DecodeGraphs | None = None
        self._layer_graphs: BucketedLayerGraphs | None = None
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
        self._graphs = self._layer_graphs = self._memory = self._ahead = None
        host = self._wrap_host_memory(arena, num_blocks, may_be_longer=False)
        with translate_device_errors():
            self._memory = DeviceCache(host[:num_blocks])
        self._inputs_builder = StepInputsBuilder(
            self._layout.block_size, self._memory.scratch_block
        )

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """See Engine.load_blocks. The next step begins the copies."""
        self._bound_memory.mark_host_written(blocks)

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]:
        """See Engine.save_blocks."""
        with torch.inference_mode(), translate_device_errors():
            return self._bound_memory.save_blocks(blocks)

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run steps of typical sizes and capture graphs; see Engine.warm_up."""
        memory = self._bound_memory
        cache = self._layout.block_size, memory.num_blocks
        for step in iter_warm_up_steps(
            GPU_PROMPT_LENGTHS, *cache, self._max_model_len, max_batched_tokens
        ):
            if not is_wanted():
                return
            self.run(step)
        if self._max_graph_rows:
            tables = self._max_graph_rows * self._layout.count_blocks(self._max_model_len)
            with translate_device_errors():
                self._graphs = capture_decode_graphs(
                    self._model, memory.cache, self._max_graph_rows, tables, is_wanted
                )
                if is_wanted():
                    self._layer_graphs = capture_layer_graphs(
                        self._model, memory.cache, max_batched_tokens, is_wanted
                    )

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
                copies = torch.tensor(batch.block_copies, device=self._device)
                self._kernels.copy_blocks(memory.cache.arena, *copies.unbind(1))
            if unloaded:
                return self._run_others(batch, unloaded)
            if not batch.slices:
                return ()
            if on_layer is not None:
                self._ahead = None
                return self._run_at_once(batch, on_layer)
            return self._run_with_prediction(batch)

    def _run_others(self, batch: StepBatch, deferred: set[int]) -> tuple[SliceResult, ...]:
        """Run the slices that need not be deferred."""
        computed = [i for i in range(len(batch.slices)) if i not in deferred]
        results = [SliceResult(is_deferred=True)] * len(batch.slices)
        others = StepBatch(tuple(batch.slices[i] for i in computed))
        for index, result in zip(computed, self._run_with_prediction(others), strict=True):
            results[index] = result
        return tuple(results)

    def _run_with_prediction(self, batch: StepBatch) -> tuple[SliceResult, ...]:
        """Take what the last call has launched ahead; slices that are not part of it wait."""
        ahead, self._ahead = self._ahead, None
        rows = {} if ahead is None else ahead.find_rows(batch.slices)
        if ahead is None or not rows:
            return self._run_now(batch)
        self._launch_ahead(batch.slices, [rows.get(i) for i in range(len(batch.slices))])
        tokens = self._read_tokens(ahead.launched)
        deferred = SliceResult(is_deferred=True)
        return tuple(
            SliceResult(require_finite(tokens[rows[i]])) if i in rows else deferred
            for i in range(len(batch.slices))
        )

    def _run_now(self, batch: StepBatch) -> tuple[SliceResult, ...]:
        """Compute a step: as a graph if it has decode slices alone."""
        graphs, builder = self._graphs, self._inputs_builder
        bucket = self._find_bucket(batch.slices)
        if graphs is None or builder is None or bucket is None:
            return self._run_at_once(batch, None)
        inputs = builder.build_inputs(batch, bucket)
        if not graphs.fits(inputs):
            return self._run_at_once(batch, None)
        launched = graphs.launch(bucket, inputs)
        self._launch_ahead(batch.slices, range(len(batch.slices)))
        return tuple(read_draws(inputs, launched.logits, self._read_tokens(launched)))

    def _read_tokens(self, launched: LaunchedStep) -> list[int]:
        tokens = launched.read_tokens()
        if self._ahead is not None:
            self._ahead.previous_tokens = tokens
        return tokens

    def _launch_ahead(
        self, slices: Sequence[SequenceSlice], launched_rows: Sequence[int | None]
    ) -> None:
        """Launch the step that follows if no sequence ends; see StepPrediction.predict."""
        graphs, builder = self._graphs, self._inputs_builder
        prediction = StepPrediction.predict(slices, launched_rows, self._layout.block_size)
        if graphs is None or builder is None or prediction is None:
            return
        bucket = graphs.find_bucket(len(prediction.batch.slices))
        if bucket is not None:
            inputs = builder.build_inputs(prediction.batch, bucket)
            if graphs.fits(inputs):
                launched = graphs.launch(bucket, inputs, continues=True)
                self._ahead = _StepAhead(prediction, launched)

    @property
    def _bound_memory(self) -> DeviceCache:
        if self._memory is None:
            raise RuntimeError("bind_cache() has not been called")
        return self._memory

    def _find_bucket(self, slices: Sequence[SequenceSlice]) -> int | None:
        """The graph that computes this step; None if it has more than decode slices."""
        if self._graphs is None or not all(map(is_decode_slice, slices)):
            return None
        return self._graphs.find_bucket(len(slices))

    def _run_at_once(
        self, batch: StepBatch, on_layer: LayerCallback | None
    ) -> tuple[SliceResult, ...]:
        """Compute any step, and read its results before the next one."""
        memory, builder = self._bound_memory, self._inputs_builder
        assert builder is not None
        bucket = self._find_token_bucket(batch)
        graphs = None
        if self._layer_graphs is not None and bucket is not None:
            graphs = self._layer_graphs.get_graphs(bucket)
        inputs = builder.build_inputs(batch, tokens=bucket)
        device_inputs = DeviceInputs.unpack(self._copy_to_device(inputs), inputs.shape)
        if on_layer is None:
            hidden = self._model.forward(device_inputs, memory.cache, graphs=graphs)
            output = self._sample(hidden, device_inputs)
        else:
            saver = memory.save_layers(on_layer.blocks, on_layer)
            with saver.finished_at_exit():
                hidden = self._model.forward(
                    device_inputs, memory.cache, saver.on_layer_written, graphs
                )
                output = self._sample(hidden, device_inputs)
        return self._read_results(batch, inputs, output, hidden)

    def _find_token_bucket(self, batch: StepBatch) -> int | None:
        """The layer graphs that compute this step; None if none do.

        A scored prompt needs all of its rows beyond the last layer, without padding.
        """
        is_scored = any(slice_.logprobs_spec is not None for slice_ in batch.slices)
        if self._layer_graphs is None or is_scored:
            return None
        return self._layer_graphs.find_bucket(batch.num_tokens)

    def _copy_to_device(self, inputs: StepInputs) -> torch.Tensor:
        words = torch.from_numpy(inputs.words)
        if self._device.type == "cpu":  # Triton's interpreter
            return words
        return words.pin_memory().to(self._device, non_blocking=True)

    def _sample(self, hidden: torch.Tensor | None, inputs: DeviceInputs) -> StepOutput | None:
        if hidden is None or not inputs.shape.draws:
            return None
        if inputs.shape.draws != inputs.shape.sampled_rows:  # all rows are scored
            hidden = hidden.index_select(0, inputs.drawn_rows)
        return draw_tokens(self._model, hidden, inputs.sampling)

    def _read_results(
        self,
        batch: StepBatch,
        inputs: StepInputs,
        output: StepOutput | None,
        hidden: torch.Tensor | None,
    ) -> tuple[SliceResult, ...]:
        """Wait for the step and read its results."""
        results = [SliceResult()] * len(batch.slices)
        if output is not None:
            drawn = read_draws(inputs, output.logits, output.tokens.tolist())
            for index, result in zip(inputs.drawn_slice_indices, drawn, strict=True):
                results[index] = result
        if hidden is not None:
            for rows in inputs.scored_rows:
                scores = score_prompt_rows(
                    hidden[rows.first_row :],
                    rows.logprobs_spec,
                    self._model.compute_logits,
                    self.vocab_size,
                )
                index = rows.slice_index
                results[index] = results[index]._replace(prompt_logprobs=scores)
        self._kernels.synchronize()
        return tuple(results)
