"""CUDA graphs of decode steps, one for each bucket of batch sizes.

A captured step is launched by one call, whatever the number of its kernels. It reads its inputs at
fixed addresses, which are filled by one copy before, and pads the batch to the bucket's size.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress

from baton.process import log
from kv_kernels.reference.paged_attention import PagedCache
from kv_kernels.triton.sampling import sample_rows
from node_engine.model.gpu.fused_transformer import FusedTransformer
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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step on the device."""

    logits: torch.Tensor  # [draws, vocab]
    tokens: torch.Tensor  # int64 [draws], -1 where the logits are not finite


class DecodeGraphs:
    """Captures decode steps and replays them. Compute thread only."""

    def __init__(self, model: FusedTransformer, cache: PagedCache, max_table_entries: int) -> None:
        """`max_table_entries`: of the block tables of all sequences of a step."""
        self._model = model
        self._cache = cache
        self._max_table_entries = max_table_entries
        self._words = torch.zeros(0, dtype=torch.int32)
        self._staging = torch.zeros(0, dtype=torch.int32)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepOutput]] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(sorted(self._graphs))

    def find_bucket(self, rows: int) -> int | None:
        """The smallest bucket for so many rows; None if there is none."""
        return min((bucket for bucket in self._graphs if bucket >= rows), default=None)

    def capture(
        self, buckets: Iterable[int], on_captured: Callable[[int], bool] = lambda _: True
    ) -> None:
        """Capture the graphs, largest first, so that they share memory.

        `on_captured` gets each size and says whether to go on.
        """
        sizes = sorted(buckets, reverse=True)
        if not sizes:
            return
        words = decode_shape(sizes[0]).num_words + self._max_table_entries
        self._words = torch.zeros(words, dtype=torch.int32, device=self._cache.arena.device)
        self._staging = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        pool = None
        for rows in sizes:
            inputs = DeviceInputs.unpack(self._words, decode_shape(rows))
            # All rows write to the scratch block and attend to nothing.
            inputs.slots.fill_((len(self._cache.arena) - 1) * self._cache.block_size)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_RUNS):
                    self._run_step(inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._run_step(inputs)
            pool = graph.pool()
            self._graphs[rows] = graph, output
            self._words.zero_()
            if not on_captured(rows):
                return

    def replay(self, bucket: int, inputs: StepInputs) -> StepOutput:
        """Queue the step. The output is valid until the next replay."""
        graph, output = self._graphs[bucket]
        count = len(inputs.words)
        self._staging.numpy()[:count] = inputs.words
        self._words[:count].copy_(self._staging[:count], non_blocking=True)
        graph.replay()
        return output

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the block tables fit into the memory of captured steps."""
        return len(inputs.words) <= len(self._words)

    def _run_step(self, inputs: DeviceInputs) -> StepOutput:
        hidden = self._model.forward(inputs, self._cache)
        assert hidden is not None
        logits = self._model.compute_logits(hidden)
        return StepOutput(logits, sample_rows(logits, inputs.sampling))


def capture_decode_graphs(
    model: FusedTransformer,
    cache: PagedCache,
    max_rows: int,
    max_table_entries: int,
    is_wanted: Callable[[], bool],
) -> DecodeGraphs | None:
    """Capture steps of up to `max_rows` sequences, with a progress bar if stderr is a terminal.

    Stops when `is_wanted` returns False. Returns None, with a warning, if that is not possible.
    """
    graphs = DecodeGraphs(model, cache, min(max_table_entries, _MAX_TABLE_ENTRIES))
    buckets = list_buckets(max_rows)
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task("capturing CUDA graphs", total=len(buckets))

    def on_captured(_: int) -> bool:
        bar.advance(task)
        return is_wanted()

    try:
        with bar, torch.inference_mode():
            graphs.capture(buckets, on_captured)
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = str(error).partition("\n")[0]
        log.get_logger("engine").warning(
            "cuda graphs not captured, decode steps are slower", reason=reason
        )
        return None
    return graphs
