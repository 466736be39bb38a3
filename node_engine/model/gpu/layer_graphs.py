"""CUDA graphs of what lies between the attention launches of a step, for buckets of tokens.

A step with prefill chunks differs from any other in its attention: its sequences, their contexts
and chunks. All else depends on the number of tokens alone. These parts are captured, one graph for
each layer and bucket, so that a small step is not bound by the host's launches; the rows that pad a
step to its bucket write to the scratch block, and nobody reads them.
"""

from collections.abc import Callable, Iterable
from functools import partial

from kv_kernels.reference.paged_attention import PagedCache
from node_engine.model.gpu.fused_transformer import FusedTransformer, TokenRows
from node_engine.model.gpu.graph_capture import (
    CaptureCall,
    CapturedCall,
    capture_graphs,
)

# Up to 512 tokens a step is bound by its launches. A larger one is not, but launching it kernel by
# kernel would keep Python's lock from the threads that hand its layers over; products of 128 more
# rows take hardly longer. Full chunks of long prompts match the largest buckets.
_SMALL_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
TOKEN_BUCKETS = (*_SMALL_BUCKETS, *range(640, 2049, 128), 2560, 3072, 3584, 4096)
_MAX_PADDING = 128  # rows


def list_token_buckets(max_tokens: int) -> list[int]:
    """The buckets of steps of up to so many tokens."""
    return [size for size in TOKEN_BUCKETS if size <= max_tokens]


class LayerGraphs:
    """The graphs of one bucket: captured calls of `begin_layer`."""

    def __init__(self, rows: TokenRows, calls: tuple[CapturedCall, ...]) -> None:
        self.rows = rows
        self._calls = calls

    def begin_layer(self, layer: int) -> None:
        self._calls[layer].replay()


class BucketedLayerGraphs:
    """Captures the graphs of all buckets. Compute thread only."""

    def __init__(self, model: FusedTransformer, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._buckets: dict[int, LayerGraphs] = {}

    def find_bucket(self, tokens: int) -> int | None:
        """The smallest bucket for so many tokens; None if there is none without much padding."""
        fitting = (size for size in self._buckets if tokens <= size <= tokens + _MAX_PADDING)
        return min(fitting, default=None)

    def get_graphs(self, bucket: int) -> LayerGraphs:
        return self._buckets[bucket]

    def capture(
        self,
        buckets: Iterable[int],
        capture_call: CaptureCall,
        on_captured: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Capture the graphs, largest first: all buckets share the memory of their rows.

        `on_captured` gets each size and says whether to go on.
        """
        sizes = sorted(buckets, reverse=True)
        if not sizes:
            return
        rows = self._model.allocate_rows(sizes[0])
        # Until a step fills them: finite values, written to the scratch block.
        for tensor in (rows.residual, rows.query, rows.attended, rows.cos, rows.sin):
            tensor.zero_()
        rows.slots.fill_((len(self._cache.arena) - 1) * self._cache.block_size)
        for size in sizes:
            self._buckets[size] = self._capture_bucket(rows.first(size), capture_call)
            if not on_captured(size):
                return

    def _capture_bucket(self, rows: TokenRows, capture_call: CaptureCall) -> LayerGraphs:
        def begin(layer: int) -> None:
            self._model.begin_layer(rows, self._cache, layer)

        calls = []
        for layer in range(self._model.num_layers):
            if layer < 2:  # compile kernels, choose algorithms of products: layers are alike
                begin(layer)
            calls.append(capture_call(partial(begin, layer)))
        return LayerGraphs(rows, tuple(calls))


def capture_layer_graphs(
    model: FusedTransformer, cache: PagedCache, max_tokens: int, is_wanted: Callable[[], bool]
) -> BucketedLayerGraphs | None:
    """Capture steps of up to `max_tokens` tokens; see `capture_graphs`."""
    return capture_graphs(
        lambda: BucketedLayerGraphs(model, cache),
        "prefill steps",
        list_token_buckets(max_tokens),
        is_wanted,
    )
