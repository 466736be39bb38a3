"""What a step of a model computes and moves: the numerators of MFU and MBU.

    flops  2 * parameters that multiply a token * tokens          without the embedding table;
                                                                  the head for sampled rows only
           + 4 * heads * head_dim * context, per token and layer  context: tokens attended to
    bytes  weights, read once                                     the head if a row is sampled
           + KV of all contexts, read once per layer
           + KV of the step's tokens, written

This is what the model needs, not what an implementation does: rows that pad a batch, rows that are
computed and discarded, and blocks that are read twice count for nothing.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from baton.kv.blocks import DTYPE_BYTES
from baton.models.model_identity import INT8, UNQUANTIZED, ModelIdentity
from node_engine.core.step.engine import ModelSize
from node_engine.core.step.step_batch import SequenceSlice, StepBatch

# Of one parameter, by the precision of its product.
PARAMETER_BYTES = DTYPE_BYTES | {"fp8": 1}


class StepWork(NamedTuple):
    """What a step computes and moves."""

    flops: float
    memory_bytes: float


class StepCosts:
    """Computes the work of steps of one model, as it is served on one node."""

    def __init__(self, size: ModelSize, identity: ModelIdentity) -> None:
        self._size = size
        self._layer_bytes = size.layer_parameters * PARAMETER_BYTES[get_product_precision(identity)]
        self._head_bytes = size.head_parameters * PARAMETER_BYTES[get_lm_head_precision(identity)]
        layout = identity.layout
        self._kv_bytes_per_layer = layout.token_bytes / layout.num_layers  # of one token
        self._num_layers_by_window = tuple(Counter(size.windows).items())

    def measure_step(self, batch: StepBatch) -> StepWork:
        """Compute the work of one step."""
        size, tokens = self._size, batch.num_tokens
        sampled_rows = _count_sampled_rows(batch.slices)
        attended, read = 0, 0  # tokens, summed over layers
        for window, num_layers in self._num_layers_by_window:
            attended_in_layer, read_in_layer = count_context_tokens(batch.slices, window)
            attended += num_layers * attended_in_layer
            read += num_layers * read_in_layer
        products = size.layer_parameters * tokens + size.head_parameters * sampled_rows
        written = len(size.windows) * tokens
        return StepWork(
            flops=2.0 * products + 4.0 * size.attention_width * attended,
            memory_bytes=self._layer_bytes
            + (self._head_bytes if sampled_rows else 0)
            + self._kv_bytes_per_layer * (read + written),
        )


def get_product_precision(identity: ModelIdentity) -> str:
    """The precision of a layer's products: quantized weights multiply quantized activations."""
    return identity.dtype if identity.quantization == UNQUANTIZED else identity.quantization


def get_lm_head_precision(identity: ModelIdentity) -> str:
    """The precision of the output head's product, which FP8 leaves as it is."""
    return INT8 if identity.quantization == INT8 else identity.dtype


def count_context_tokens(slices: Sequence[SequenceSlice], window: int | None) -> tuple[int, int]:
    """Count the tokens that the queries of one layer attend to, and those whose KV it reads.

    A query attends to itself and to the tokens before it, `window` tokens in all. The KV of a token
    is read once for a slice, however many of its queries attend to it.
    """
    attended = read = 0
    for slice_ in slices:
        begin, count = slice_.start, len(slice_.token_ids)
        end = begin + count
        if count == 1:  # most slices, so this is the fast way
            context = end if window is None or end < window else window
            attended += context
            read += context
            continue
        if window is None or end <= window:
            attended += count * begin + count * (count + 1) // 2
            read += end
            continue
        growing = max(0, window - begin)  # queries with fewer than `window` tokens before them
        attended += growing * begin + growing * (growing + 1) // 2 + (count - growing) * window
        read += min(end, window + count - 1)
    return attended, read


def _count_sampled_rows(slices: Sequence[SequenceSlice]) -> int:
    """Count the rows whose logits are computed."""
    sampled = sum(
        1 + len(slice_.draft_specs) for slice_ in slices if slice_.sample_spec is not None
    )
    scored = [slice_.logprobs_spec for slice_ in slices if slice_.logprobs_spec is not None]
    return sampled + sum(len(spec.target_token_ids) for spec in scored)
