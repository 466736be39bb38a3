"""CUDA graphs of decode steps, one for each bucket of batch sizes.

A captured step is launched by one call, whatever the number of its kernels. It reads its inputs at
fixed addresses, which are filled by one copy before, and pads the batch to the bucket's size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from kv_kernels.reference.paged_attention import PagedCache
from node_engine.model.gpu.draws import StepOutput, draw_tokens
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.graph_capture import (
    CaptureCall,
    CapturedCall,
    CaptureProgress,
    capturing_on_side_stream,
)
from node_engine.model.gpu.step_inputs import DeviceInputs, StepInputs, StepShape

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


class _Mark:
    """A point in the order of launches that the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Mark what is launched so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A decode step that the GPU computes."""

    logits: torch.Tensor  # [rows, vocab], valid until the next launch
    _tokens: torch.Tensor  # int64 [rows], pinned, valid until the launch after the next one
    _tokens_copied: _Mark

    def read_tokens(self) -> list[int]:
        """Wait for the step; the token of each row, -1 where the logits are not finite."""
        self._tokens_copied.wait()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class _Staging:
    """Host memory for the inputs and the tokens of a launch."""

    def __init__(self, words: int, rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.words = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self.tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self.words_copied = _Mark(device)  # the words may be overwritten


class DecodeGraphs:
    """Captures decode steps and replays them. Compute thread only."""

    def __init__(self, model: FusedTransformer, cache: PagedCache, max_table_entries: int) -> None:
        """`max_table_entries`: of the block tables of all sequences of a step."""
        self._model = model
        self._cache = cache
        self._max_table_entries = max_table_entries
        self._words = torch.zeros(0, dtype=torch.int32)
        self._last_tokens = torch.zeros(0, dtype=torch.int64)  # of the last launch, by row
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
        self._last_tokens = torch.zeros(sizes[0], dtype=torch.int64, device=device)
        self._stagings = [_Staging(words, sizes[0], device) for _ in range(2)]
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

    def launch(self, bucket: int, inputs: StepInputs, *, continues: bool = False) -> LaunchedStep:
        """Queue a step.

        With `continues`, a negative token -1 - n is the one that row n of the step launched before
        it samples.
        """
        self._stagings.reverse()
        staging, count = self._stagings[0], len(inputs.words)
        staging.words_copied.wait()
        staging.words.numpy()[:count] = inputs.words
        self._words[:count].copy_(staging.words[:count], non_blocking=True)
        staging.words_copied.record()
        if continues:
            token_ids = DeviceInputs.unpack(self._words, inputs.shape).token_ids
            # A token of -1 ends its step with an error; meanwhile it must not crash the next one.
            sources = (-1 - token_ids).clamp_(min=0)
            sampled = self._last_tokens.index_select(0, sources).clamp_(min=0)
            token_ids.copy_(torch.where(token_ids < 0, sampled, token_ids))
        self._graphs[bucket].replay()
        output = self._outputs[bucket]
        self._last_tokens[:bucket].copy_(output.tokens)
        tokens = staging.tokens[:bucket]
        tokens.copy_(output.tokens, non_blocking=True)
        tokens_copied = _Mark(output.tokens.device)
        tokens_copied.record()
        return LaunchedStep(output.logits, tokens, tokens_copied)

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
    """Capture steps of up to `max_rows` sequences, with a progress bar if stderr is a terminal.

    Stops when `is_wanted` returns False. Returns None, with a warning, if that is not possible;
    raises torch.AcceleratorError if the GPU has failed.
    """
    graphs = DecodeGraphs(model, cache, min(max_table_entries, _MAX_TABLE_ENTRIES))
    buckets = list_buckets(max_rows)
    with (
        CaptureProgress("decode steps", len(buckets), is_wanted) as progress,
        capturing_on_side_stream() as capture_call,
    ):
        graphs.capture(buckets, capture_call, progress.on_captured)
    if not progress.has_failed:
        return graphs
    del graphs
    torch.cuda.empty_cache()
    return None
