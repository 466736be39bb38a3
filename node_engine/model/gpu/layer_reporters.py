"""Report each layer of a step once its blocks can be read, in device memory or in host memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from kv_kernels.triton.block_copy import copy_blocks_between


class LayerReporter(Protocol):
    """Reports the layers of one step in their order."""

    def on_layer_written(self, layer: int) -> None:
        """The launches that write this layer are queued. Queues its copy, if there is one."""
        ...

    def finished_at_exit(self) -> AbstractContextManager[None]:
        """Report the remaining layers at the end.

        If the block raises, return when what is queued for the layers has ended.
        """
        ...

    def measure_copy_wait(self) -> float:
        """At the end: seconds by which the last copy ended later than the step itself."""
        ...


class HostLayerSaver:
    """A LayerReporter for Triton's interpreter, where a copy has ended when it was launched."""

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        blocks: torch.Tensor,  # int32 [n]
        on_saved: Callable[[int], None],
    ) -> None:
        self._device, self._host, self._blocks = device, host, blocks
        self._on_saved = on_saved

    def on_layer_written(self, layer: int) -> None:
        copy_blocks_between(self._device, self._host, self._blocks, layer)
        self._on_saved(layer)

    def measure_copy_wait(self) -> float:
        return 0.0

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        yield


class CudaLayerReporter:
    """A LayerReporter that copies nothing: layers are read in device memory."""

    def __init__(self, on_saved: Callable[[int], None]) -> None:
        self._on_saved = on_saved
        self._queued: list[tuple[int, torch.cuda.Event]] = []  # layers, in the order of their ends
        self._num_reported = 0

    def on_layer_written(self, layer: int) -> None:
        self._queued.append((layer, self._queue_end(layer)))
        while (
            self._num_reported < len(self._queued) and self._queued[self._num_reported][1].query()
        ):
            self._report_next()

    def _queue_end(self, layer: int) -> torch.cuda.Event:
        """Queue what is left to do for a layer, and the event of its end."""
        computed = torch.cuda.Event()
        computed.record()
        return computed

    def measure_copy_wait(self) -> float:
        return 0.0

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        try:
            yield
            self._report_rest()
        finally:
            if self._queued:  # the blocks of a step that failed may get another owner
                self._queued[-1][1].synchronize()

    def _report_rest(self) -> None:
        while self._num_reported < len(self._queued):
            self._queued[self._num_reported][1].synchronize()
            self._report_next()

    def _report_next(self) -> None:
        layer, _ = self._queued[self._num_reported]
        self._num_reported += 1
        self._on_saved(layer)


class CudaLayerSaver(CudaLayerReporter):
    """Copies layers to host memory on a stream of its own, so that no kernel waits for a copy."""

    _stream: torch.cuda.Stream | None = None

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        blocks: torch.Tensor,  # int32 [n]
        on_saved: Callable[[int], None],
    ) -> None:
        super().__init__(on_saved)
        self._device, self._host, self._blocks = device, host, blocks
        if CudaLayerSaver._stream is None:
            CudaLayerSaver._stream = torch.cuda.Stream()
        self._side = CudaLayerSaver._stream
        self._side.wait_stream(torch.cuda.current_stream())
        self._computed = torch.cuda.Event(enable_timing=True)

    def _queue_end(self, layer: int) -> torch.cuda.Event:
        written = torch.cuda.Event()
        written.record()
        with torch.cuda.stream(self._side):
            self._side.wait_event(written)
            copy_blocks_between(self._device, self._host, self._blocks, layer)
            saved = torch.cuda.Event(enable_timing=True)
            saved.record()
        return saved

    def measure_copy_wait(self) -> float:
        if not self._queued or not self._computed.query():
            return 0.0  # the copies have ended first
        milliseconds: float = self._computed.elapsed_time(self._queued[-1][1])
        return max(0.0, milliseconds * 1e-3)

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        try:
            yield
            self._computed.record()
            self._report_rest()
        finally:
            # The next step of this stream may overwrite what is being copied.
            self._side.synchronize()
