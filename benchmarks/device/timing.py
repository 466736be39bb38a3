"""Times calls on a device: by events on a GPU's stream, by the clock on a CPU."""

import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
_WARM_UP_CALLS = 3


def time_rounds(call: Call, device: torch.device, rounds: int = 20) -> list[float]:
    """Return the seconds of each of `rounds` calls, after a warm-up."""
    for _ in range(_WARM_UP_CALLS):
        call()
    if device.type == "cpu":
        return [time_call(call) for _ in range(rounds)]
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(rounds)
    ]
    for before, after in spans:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in spans]


def median_seconds(call: Call, device: torch.device, rounds: int = 20) -> float:
    return statistics.median(time_rounds(call, device, rounds))


def capture_calls(call: Call, device: torch.device, times: int = 1) -> Call:
    """Return a call that makes `times` calls: on a GPU one launch of a graph of their kernels."""
    if device.type == "cpu":
        return lambda: [call() for _ in range(times)]
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def time_call(call: Call) -> float:
    """Return the seconds of one call that is complete when it returns."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
