"""CUDA graphs of decode steps, one for each bucket of batch sizes.

A captured step is launched by one call, whatever the number of its kernels. It reads its inputs at
fixed addresses, which are filled by one copy before, and pads the batch to the bucket's size.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from kv_kernels.reference.paged_attention import PagedCache
from node_engine.model.gpu.draws import StepOutput, draw_tokens
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.graph_capture import (
    CaptureCall,
    CapturedCall,
    capture_graphs,
)
from node_engine.model.gpu.launch_mark import LaunchMark
from node_engine.model.gpu.step_inputs import (
    DeviceInputs,
    StepInputs,
    StepShape,
    resolve_source_rows,
)

_MAX_TABLE_ENTRIES = 1 << 22  # of the block tables of all sequences of a step: 16 MiB
_WARM_UP_RUNS = 2  # before a capture: compile kernels, choose algorithms of products


def list_buckets(max_rows: int) -> list[int]:
    """Batch sizes with a graph: powers of two, and steps of 8 and 32 beyond, up to `max_rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 1025, 64)]
    buckets = [size for size in sizes if size < max_rows]
    return [*buckets, max_rows] if max_rows <= sizes[-1] else buckets


def decode_shape(rows: int) -> StepShape:
    """The shape of a step of `rows` decode slices."""
    return StepShape(tokens=rows, decode_rows=rows, sampled_rows=rows, draws=rows, tiles=0)


class _Staging:
    """Host memory for the inputs of a launch."""

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.words = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self.words_copied = LaunchMark(device)  # the words may be overwritten


class DecodeGraphs:
    """Captures decode steps and replays them. Compute thread only."""

    def __init__(self, model: FusedTransformer, cache: PagedCache, max_table_entries: int) -> None:
        """`max_table_entries`: of the block tables of all sequences of a step."""
        self._model = model
        self._cache = cache
        self._max_table_entries = max_table_entries
        self._words = torch.zeros(0, dtype=torch.int32)
        self._stagings: list[_Staging] = []  # used in turn
        self._graphs: dict[int, CapturedCall] = {}
        self._outputs: dict[int, StepOutput] = {}  # of each graph

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(sorted(self._graphs))

    def find_bucket(self, rows: int) -> int | None:
        """The smallest bucket for so many rows; None if there is none."""
        return min((bucket for bucket in self._graphs if bucket >= rows), default=None)

    def capture(
        self,
        buckets: Iterable[int],
        capture_call: CaptureCall,
        on_captured: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Capture the graphs, largest first, so that they share memory.

        `on_captured` gets each size and says whether to go on.
        """
        sizes = sorted(buckets, reverse=True)
        if not sizes:
            return
        device = self._cache.arena.device
        words = decode_shape(sizes[0]).num_words + self._max_table_entries
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._stagings = [_Staging(words, device) for _ in range(2)]
        for rows in sizes:
            inputs = DeviceInputs.unpack(self._words, decode_shape(rows))
            # All rows write to the scratch block and attend to nothing.
            inputs.slots.fill_((len(self._cache.arena) - 1) * self._cache.block_size)
            for _ in range(_WARM_UP_RUNS):
                self._run_step(rows, inputs)
            self._graphs[rows] = capture_call(partial(self._run_step, rows, inputs))
            self._words.zero_()
            if not on_captured(rows):
                return

    def replay(
        self,
        bucket: int,
        inputs: StepInputs,
        last_tokens: torch.Tensor | None,  # int64, by row
    ) -> StepOutput:
        """Queue a step; its output is valid until the next one.

        Negative tokens are replaced by `last_tokens`: see `resolve_source_rows`.
        """
        self._stagings.reverse()
        staging, count = self._stagings[0], len(inputs.words)
        staging.words_copied.wait()
        staging.words.numpy()[:count] = inputs.words
        self._words[:count].copy_(staging.words[:count], non_blocking=True)
        staging.words_copied.record()
        if last_tokens is not None:
            resolve_source_rows(
                DeviceInputs.unpack(self._words, inputs.shape).token_ids, last_tokens
            )
        self._graphs[bucket].replay()
        return self._outputs[bucket]

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the block tables fit into the memory of captured steps."""
        return len(inputs.words) <= len(self._words)

    def _run_step(self, rows: int, inputs: DeviceInputs) -> None:
        hidden = self._model.forward(inputs, self._cache)
        assert hidden is not None
        self._outputs[rows] = draw_tokens(self._model, hidden, inputs.sampling)


def capture_decode_graphs(
    model: FusedTransformer,
    cache: PagedCache,
    max_rows: int,
    max_table_entries: int,
    is_wanted: Callable[[], bool],
) -> DecodeGraphs | None:
    """Capture steps of up to `max_rows` sequences; see `capture_graphs`."""
    entries = min(max_table_entries, _MAX_TABLE_ENTRIES)
    return capture_graphs(
        lambda: DecodeGraphs(model, cache, entries),
        "decode steps",
        list_buckets(max_rows),
        is_wanted,
    )
