"""What all engines over a Hugging Face model have in common: what they are, and their bounds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from baton.errors import ConfigError, OutOfMemory
from baton.kv.blocks import KVLayout
from baton.models.model_identity import (
    NATIVE_IMPLEMENTATION,
    UNQUANTIZED,
    ModelIdentity,
    Quantization,
)
from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from baton.types import BlockIndex, TokenLogprobs
from kv_kernels.reference.host_memory import MemoryPinError
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import CacheLimits, DeviceLost, LayerCallback, ModelSize
from node_engine.core.step.step_batch import PromptLogprobsSpec, SliceResult, StepBatch
from node_engine.model.common.compute_device import describe_device
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.model_size import build_model_size
from node_engine.model.sampling.logprobs import compute_logprobs, compute_rows_at_once

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class BaseEngine(ABC):
    """An `Engine` over one model: what does not depend on its device."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: TorchKernels,
        layout: KVLayout,
        device: torch.device,
        max_model_len: int,
        digest: bytes,
        *,
        quantization: Quantization = UNQUANTIZED,
        dtype: str | None = None,  # of the arithmetic; None: that of the cache
    ) -> None:
        self.compute_device = describe_device(device)
        self.model_size: ModelSize | None = build_model_size(config)
        self._config = config
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._max_model_len = max_model_len
        self._digest = digest
        self._quantization = quantization
        self._dtype = dtype or layout.dtype

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
        config, digest = self._config, self._digest.hex()
        return ModelIdentity(
            NATIVE_IMPLEMENTATION,
            digest,
            self._dtype,
            self._quantization,
            self._layout,
            config.vocab_size,
            config.eos_token_ids,
        )

    @property
    @abstractmethod
    def cache_limits(self) -> CacheLimits: ...
    @abstractmethod
    def bind_cache(self, arena: memoryview, num_blocks: int) -> None: ...
    @abstractmethod
    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None: ...
    @abstractmethod
    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]: ...
    @abstractmethod
    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None: ...
    @abstractmethod
    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]: ...

    def _wrap_host_memory(
        self, arena: memoryview, num_blocks: int, *, may_be_longer: bool
    ) -> torch.Tensor:
        """The arena as a tensor [blocks, layers, 2, kv_heads, block_size, row] for kernels.

        Raises ValueError if it is read-only, too short or not whole blocks, ConfigError if the GPU
        cannot use it, and DeviceLost if the GPU has failed.
        """
        layout = self._layout
        reach, rest = divmod(arena.nbytes, layout.block_bytes)
        if (
            arena.readonly
            or rest
            or reach < num_blocks
            or (reach > num_blocks and not may_be_longer)
        ):
            raise ValueError(
                f"arena of {arena.nbytes} bytes (read-only: {arena.readonly}): {num_blocks} blocks"
                f" need {num_blocks * layout.block_bytes} writable bytes"
            )
        try:
            with translate_device_errors():
                memory = self._kernels.memory_as_tensor(arena, TORCH_DTYPES[layout.dtype])
        except MemoryPinError as error:
            raise ConfigError(
                f"the GPU cannot use the cache memory: {error}: its folder has to be of a tmpfs"
                f" like {DEFAULT_SEGMENT_FOLDER}: choose one with --segment-dir; or allow the"
                " process more locked memory (ulimit -l)"
            ) from error
        row = layout.row_bytes // memory.itemsize
        return memory.view(reach, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, row)


def logits_by_row(
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,  # [rows, hidden]
) -> Callable[[int, int], torch.Tensor]:
    """What `score_prompt_rows` computes logits with, for rows whose hidden states are there."""
    return lambda first, count: compute_logits(hidden[first : first + count])


def score_prompt_rows(
    # (first, count) -> logits [count, vocab], counted from the first scored row on
    compute_logits: Callable[[int, int], torch.Tensor],
    spec: PromptLogprobsSpec,
    vocab_size: int,
) -> tuple[TokenLogprobs, ...]:
    """Score prompt tokens, a bounded number of rows at a time, to bound memory."""
    targets = spec.target_token_ids
    rows_at_once = compute_rows_at_once(vocab_size)
    found: list[TokenLogprobs] = []
    for begin in range(0, len(targets), rows_at_once):
        chunk = targets[begin : begin + rows_at_once]
        logits = compute_logits(begin, len(chunk))
        found += compute_logprobs(logits.float(), chunk, [spec.top_logprobs] * len(chunk))
    return tuple(found)


@contextmanager
def translate_device_errors() -> Iterator[None]:
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
