"""Captures CUDA graphs: how, what is shown meanwhile, and what happens if it fails."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress

from baton.process import log


class CapturedCall(Protocol):
    """A captured sequence of launches."""

    def replay(self) -> None: ...


# Calls a function in a capture, and returns what was captured.
CaptureCall = Callable[[Callable[[], None]], CapturedCall]


class BucketedGraphs(Protocol):
    """Graphs of steps, one or several for each bucket of sizes."""

    def capture(
        self,
        buckets: Iterable[int],
        capture_call: CaptureCall,
        on_captured: Callable[[int], bool] = ...,
    ) -> None:
        """Capture the graphs; `on_captured` gets each size and says whether to go on."""
        ...


G = TypeVar("G", bound=BucketedGraphs)


@contextmanager
def capturing_on_side_stream() -> Iterator[CaptureCall]:
    """What captures calls as CUDA graphs that share one pool of memory, on a stream of its own.

    The graphs must be replayed one after another, as their calls were captured: a result that lies
    in the pool is overwritten by the next graph.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def capture(call: Callable[[], None]) -> CapturedCall:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)
        try:
            call()
        except BaseException:
            with suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the graph is not complete
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        yield capture
    torch.cuda.synchronize()


class CaptureProgress:
    """Shows a capture on a terminal. As a context, turns its failure into a warning.

    A node without graphs is slower, but right. A lost GPU is an error.
    """

    def __init__(self, steps: str, total: int, is_wanted: Callable[[], bool]) -> None:
        """`steps`: what is captured. `total`: number of captures."""
        self.has_failed = False
        self._steps = steps
        self._is_wanted = is_wanted
        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(f"capturing CUDA graphs of {steps}", total=total)
        self._inference = torch.inference_mode()

    def on_captured(self, _: int) -> bool:
        """Count a capture; returns whether to go on."""
        self._bar.advance(self._task)
        return self._is_wanted()

    def __enter__(self) -> "CaptureProgress":
        self._bar.start()
        self._inference.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._inference.__exit__(kind, error, traceback)
        self._bar.stop()
        if not isinstance(error, RuntimeError):
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises again if the device is lost
        log.get_logger("engine").warning(
            "cuda graphs not captured, steps are slower",
            steps=self._steps,
            reason=str(error).partition("\n")[0],
        )
        self.has_failed = True
        return True


def capture_graphs(
    make: Callable[[], G], steps: str, buckets: Sequence[int], is_wanted: Callable[[], bool]
) -> G | None:
    """Make graphs of steps and capture a bucket after the other, until `is_wanted` returns False.

    There is a progress bar if stderr is a terminal. Returns None, with a warning and with their
    memory free again, if they cannot be captured. Raises torch.AcceleratorError if the GPU has
    failed.
    """
    graphs = make()
    with (
        CaptureProgress(steps, len(buckets), is_wanted) as progress,
        capturing_on_side_stream() as capture_call,
    ):
        graphs.capture(buckets, capture_call, progress.on_captured)
    if not progress.has_failed:
        return graphs
    del graphs
    torch.cuda.empty_cache()
    return None
