"""ModelEngine: runs the model of a Hugging Face folder as the engine of a node."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from baton.errors import ConfigError, OutOfMemory
from baton.kv.kv_layout import KVLayout
from baton.models.model_identity import NATIVE_IMPLEMENTATION, UNQUANTIZED, ModelIdentity
from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from baton.types import TokenLogprobs
from kv_kernels.reference.host_memory import MemoryPinError
from kv_kernels.reference.paged_cache import PagedCache
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import DeviceLost, LayerCallback
from node_engine.core.step.step_batch import SampleSpec, SliceResult, StepBatch
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.forward_batch import ForwardBatch, ForwardBatchBuilder
from node_engine.model.sampling.logprobs import compute_logprobs, compute_rows_at_once
from node_engine.model.transformer import Transformer
from node_engine.model.warm_up import CPU_PROMPT_LENGTHS, GPU_PROMPT_LENGTHS, iter_warm_up_steps

# Draws one token for each row of logits [rows, vocab], which it may overwrite.
Sampler = Callable[[torch.Tensor, Sequence[SampleSpec]], Sequence[SliceResult]]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelEngine:
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
        self._config = config
        self._model = model
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._max_model_len = max_model_len
        self._digest = digest
        self._sample_tokens = sampler
        self._cache: PagedCache | None = None
        self._batch_builder: ForwardBatchBuilder | None = None
        self._num_blocks = 0

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._config.eos_token_ids

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def model_digest(self) -> bytes:
        return self._digest

    @property
    def model_identity(self) -> ModelIdentity:
        config, dtype = self._config, self._layout.dtype
        digest = self._digest.hex()
        return ModelIdentity(
            NATIVE_IMPLEMENTATION,
            digest,
            dtype,
            UNQUANTIZED,
            self._layout,
            config.vocab_size,
            config.eos_token_ids,
        )

    @property
    def device(self) -> str:
        """The resolved device, for logs."""
        return self._device.type

    @property
    def can_read_pool_in_place(self) -> bool:
        """False on a GPU: only the arena itself is pinned and mapped there."""
        return self._device.type == "cpu"

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """Use `arena` as cache memory; see Engine.bind_cache.

        Raises ValueError if it is read-only, too short or not whole blocks, ConfigError if the GPU
        cannot use it, and DeviceLost if the GPU has failed.
        """
        layout = self._layout
        reach, rest = divmod(arena.nbytes, layout.block_bytes)
        if (
            arena.readonly
            or rest
            or reach < num_blocks
            or (reach > num_blocks and not self.can_read_pool_in_place)
        ):
            raise ValueError(
                f"arena of {arena.nbytes} bytes (read-only: {arena.readonly}): {num_blocks} blocks"
                f" need {num_blocks * layout.block_bytes} writable bytes"
            )
        shape = (
            reach,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        try:
            with _translate_device_errors():
                memory = self._kernels.memory_as_tensor(arena, TORCH_DTYPES[layout.dtype])
        except MemoryPinError as error:
            raise ConfigError(
                f"the GPU cannot use the cache memory: {error}: its folder has to be of a tmpfs"
                f" like {DEFAULT_SEGMENT_FOLDER}: choose one with --segment-dir; or allow the"
                " process more locked memory (ulimit -l)"
            ) from error
        self._cache = PagedCache.from_arena(memory.view(shape))
        self._batch_builder = ForwardBatchBuilder(self._kernels, self._cache, self._config.windows)
        self._num_blocks = num_blocks

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run steps of typical sizes in the empty cache; see Engine.warm_up."""
        prompts = CPU_PROMPT_LENGTHS if self._device.type == "cpu" else GPU_PROMPT_LENGTHS
        cache = self._layout.block_size, self._num_blocks
        for step in iter_warm_up_steps(prompts, *cache, self._max_model_len, max_batched_tokens):
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
        with torch.inference_mode(), _translate_device_errors():
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
                self._compute_prompt_logprobs(hidden, plan, results)
            self._kernels.synchronize()
        return tuple(results)

    def _compute_prompt_logprobs(
        self, hidden: torch.Tensor, plan: ForwardBatch, results: list[SliceResult]
    ) -> None:  # hidden [tokens, hidden]
        """Score prompt tokens, a bounded number of rows at a time, to bound memory."""
        for rows in plan.prompt_logprob_rows:
            targets = rows.logprobs_spec.target_token_ids
            rows_at_once = compute_rows_at_once(self.vocab_size)
            found: list[TokenLogprobs] = []
            for begin in range(0, len(targets), rows_at_once):
                chunk = targets[begin : begin + rows_at_once]
                logits = self._model.compute_logits(hidden[rows.first_row + begin :][: len(chunk)])
                found += compute_logprobs(
                    logits.float(), chunk, [rows.logprobs_spec.top_logprobs] * len(chunk)
                )
            results[rows.slice_index] = results[rows.slice_index]._replace(
                prompt_logprobs=tuple(found)
            )


@contextmanager
def _translate_device_errors() -> Iterator[None]:
    """Translate torch's errors: memory exhausted to OutOfMemory, a failed GPU to DeviceLost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the device has no memory left for this step: {error}: lower --max-batched-tokens"
        ) from error
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error)) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"no memory left for this step: {error}: lower --max-batched-tokens"
        ) from error
