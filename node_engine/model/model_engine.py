"""ModelEngine: runs the model of a Hugging Face folder on CPUs, in the host's cache memory."""

from collections.abc import Callable, Sequence

import torch

from baton.kv.kv_layout import KVLayout
from baton.types import BlockIndex
from kv_kernels.reference.paged_cache import PagedCache
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import CacheLimits, LayerCallback
from node_engine.core.step.step_batch import SampleSpec, SliceResult, StepBatch
from node_engine.model.base_engine import BaseEngine, score_prompt_rows, translate_device_errors
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.forward_batch import ForwardBatchBuilder
from node_engine.model.transformer import Transformer
from node_engine.model.warm_up import CPU_PROMPT_LENGTHS, iter_warm_up_steps

# Draws one token for each row of logits [rows, vocab], which it may overwrite.
Sampler = Callable[[torch.Tensor, Sequence[SampleSpec]], Sequence[SliceResult]]


class ModelEngine(BaseEngine):
    """An `Engine` over one model and one arena. Not thread-safe: compute thread only."""

    def __init__(
        self,
        config: ModelConfig,
        model: Transformer,
        kernels: TorchKernels,
        layout: KVLayout,
        device: torch.device,
        max_model_len: int,
        digest: bytes,
        sampler: Sampler,
    ) -> None:
        super().__init__(config, kernels, layout, device, max_model_len, digest)
        self._model = model
        self._sample_tokens = sampler
        self._cache: PagedCache | None = None
        self._batch_builder: ForwardBatchBuilder | None = None
        self._num_blocks = 0

    @property
    def cache_limits(self) -> CacheLimits:
        return CacheLimits()

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory; see Engine.bind_cache.

        Raises ValueError if it is read-only, too short or not whole blocks, ConfigError if the GPU
        cannot use it, and DeviceLost if the GPU has failed.
        """
        memory = self._wrap_host_memory(arena, num_blocks, may_be_longer=True)
        self._cache = PagedCache.from_arena(memory)
        self._batch_builder = ForwardBatchBuilder(self._kernels, self._cache, self._config.windows)
        self._num_blocks = num_blocks

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Steps compute in the arena itself."""

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Steps compute in the arena itself."""

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run steps of typical sizes in the empty cache; see Engine.warm_up."""
        cache = self._layout.block_size, self._num_blocks
        for step in iter_warm_up_steps(
            CPU_PROMPT_LENGTHS, *cache, self._max_model_len, max_batched_tokens
        ):
            if not is_wanted():
                return
            self.run(step)

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        """Run one forward pass; see Engine.run.

        Raises OutOfMemory, NodeFailed if logits are not finite, and DeviceLost if the GPU failed.
        """
        if self._cache is None or self._batch_builder is None:
            raise RuntimeError("run() before bind_cache()")
        results = [SliceResult()] * len(batch.slices)
        with torch.inference_mode(), translate_device_errors():
            if batch.block_copies:
                source, target = torch.tensor(batch.block_copies, device=self._device).unbind(1)
                self._kernels.copy_blocks(self._cache.arena, source, target)
            if not batch.slices:
                return ()
            plan = self._batch_builder.build_batch(batch)
            if len(plan.partly_filled_blocks):
                self._kernels.clear_blocks(self._cache.arena, plan.partly_filled_blocks)
            hidden = self._model.forward(plan, self._cache, on_layer)
            if hidden is not None and plan.sample_specs:
                drawn = (
                    hidden.index_select(0, plan.drawn_rows) if plan.prompt_logprob_rows else hidden
                )
                for index, result in zip(
                    plan.drawn_slice_indices,
                    self._sample_tokens(self._model.compute_logits(drawn), plan.sample_specs),
                    strict=True,
                ):
                    results[index] = result
            if hidden is not None and plan.prompt_logprob_rows:
                for rows in plan.prompt_logprob_rows:
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
