"""GpuEngine: runs a model on an NVIDIA GPU, with the KV cache in device memory."""

from collections.abc import Callable, Sequence

import torch

from baton.errors import NodeFailed
from baton.kv.blocks import KVLayout
from baton.types import BlockIndex
from kv_kernels.reference.torch_kernels import TorchKernels
from kv_kernels.triton.sampling import sample_rows
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
    StepOutput,
    capture_decode_graphs,
)
from node_engine.model.gpu.device_cache import DeviceCache, measure_room_for_cache
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.step_inputs import DeviceInputs, StepInputs, StepInputsBuilder
from node_engine.model.sampling.sampler import needs_extra_steps, sample_tokens


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
        super().__init__(config, kernels, layout, device, max_model_len, digest)
        self._model = model
        self._max_graph_rows = max_graph_rows
        self._memory: DeviceCache | None = None
        self._inputs_builder: StepInputsBuilder | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def cache_limits(self) -> CacheLimits:
        """The pool is in host memory, which the GPU's kernels do not read."""
        return CacheLimits(False, measure_room_for_cache(self._device, self._config))

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Allocate the device arena, and pin `arena`, its copy in the host; see Engine.bind_cache.

        Raises ValueError if `arena` is read-only, too short or not whole blocks; ConfigError if the
        GPU cannot use it or has too little free memory; and DeviceLost if the GPU has failed.
        """
        self._graphs = self._memory = None
        host = self._wrap_host_memory(arena, num_blocks, may_be_longer=False)
        with translate_device_errors():
            self._memory = DeviceCache(host[:num_blocks])
        self._inputs_builder = StepInputsBuilder(
            self._layout.block_size, self._memory.scratch_block
        )

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """See Engine.load_blocks. The copies are queued with the next step."""
        self._bound_memory.mark_host_written(blocks)

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """See Engine.save_blocks."""
        with torch.inference_mode(), translate_device_errors():
            self._bound_memory.save_blocks(blocks)

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Capture the graphs of decode steps and run prefill steps; see Engine.warm_up."""
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
            self._graphs = capture_decode_graphs(
                self._model, memory.cache, self._max_graph_rows, tables, is_wanted
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
            if batch.block_copies:
                copies = torch.tensor(batch.block_copies, device=self._device)
                self._kernels.copy_blocks(memory.cache.arena, *copies.unbind(1))
            if not batch.slices:
                return ()
            bucket = None if on_layer is not None else self._find_bucket(batch)
            assert self._inputs_builder is not None
            inputs = self._inputs_builder.build_inputs(batch, bucket)
            if bucket is not None and self._graphs is not None and self._graphs.fits(inputs):
                output = self._graphs.replay(bucket, inputs)
                return self._read_results(batch, inputs, output, None)
            return self._run_eagerly(batch, inputs, on_layer)

    @property
    def _bound_memory(self) -> DeviceCache:
        if self._memory is None:
            raise RuntimeError("bind_cache() has not been called")
        return self._memory

    def _find_bucket(self, batch: StepBatch) -> int | None:
        """The graph that computes this step; None if it has more than decode slices."""
        if self._graphs is None or not all(map(_is_decode_slice, batch.slices)):
            return None
        return self._graphs.find_bucket(len(batch.slices))

    def _run_eagerly(
        self, batch: StepBatch, inputs: StepInputs, on_layer: LayerCallback | None
    ) -> tuple[SliceResult, ...]:
        memory = self._bound_memory
        device_inputs = DeviceInputs.unpack(self._copy_to_device(inputs), inputs.shape)
        if on_layer is None:
            hidden = self._model.forward(device_inputs, memory.cache)
            output = self._sample(hidden, device_inputs)
        else:
            saver = memory.save_layers(on_layer.blocks, on_layer)
            with saver.finished_at_exit():
                hidden = self._model.forward(device_inputs, memory.cache, saver.on_layer_written)
                output = self._sample(hidden, device_inputs)
        return self._read_results(batch, inputs, output, hidden)

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
        logits = self._model.compute_logits(hidden)
        return StepOutput(logits, sample_rows(logits, inputs.sampling))

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
            drawn = self._read_draws(inputs, output)
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

    def _read_draws(self, inputs: StepInputs, output: StepOutput) -> list[SliceResult]:
        """The drawn tokens. Raises NodeFailed if logits are not finite."""
        specs = inputs.sample_specs
        tokens = output.tokens[: len(specs)].tolist()
        if min(tokens) < 0:
            raise NodeFailed(
                "logits are not finite: the model's weights or its KV cache are damaged"
            )
        drawn = [SliceResult(token) for token in tokens]
        special = [row for row, spec in enumerate(specs) if needs_extra_steps(spec)]
        if special:
            logits = output.logits[special]
            again = sample_tokens(logits, [specs[row] for row in special])
            for row, result in zip(special, again, strict=True):
                drawn[row] = result
        return drawn


def _is_decode_slice(slice_: SequenceSlice) -> bool:
    return (
        len(slice_.token_ids) == 1
        and slice_.sample_spec is not None
        and slice_.logprobs_spec is None
    )
