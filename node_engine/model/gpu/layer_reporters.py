"""Report each layer of a step once its blocks can be read, in device memory or in host memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from kv_kernels.triton.block_copy import copy_blocks_between
from node_engine.core.step.engine import LayerCallback


class LayerReporter(Protocol):
    """Reports the layers of one step in their order."""

    def on_layer_written(self, layer: int) -> None:
        """The launches that write this layer are queued. Queues its copy, if there is one."""
        ...

    def end_launch(self) -> None:
        """All of the step is queued."""
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

    def end_launch(self) -> None:
        """All layers were reported."""

    def measure_copy_wait(self) -> float:
        return 0.0

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        yield


class _QueuedLayers:
    """Layers of a step in their order, and the events after which they are reported."""

    def __init__(self, on_saved: Callable[[int], None]) -> None:
        self.events: dict[int, torch.cuda.Event] = {}  # by the last layer that each covers
        self._on_saved = on_saved
        self._num_reported = 0

    def report_next(self) -> None:
        """Report the layers of the next event, which has passed."""
        last = next(layer for layer in self.events if layer >= self._num_reported)
        while self._num_reported <= last:
            self._num_reported += 1
            self._on_saved(self._num_reported - 1)

    def find_next_event(self) -> torch.cuda.Event | None:
        """The first event whose layers are not reported; None if all are."""
        return next(
            (event for layer, event in self.events.items() if layer >= self._num_reported), None
        )

    def report_rest(self) -> None:
        """Report all other layers, each after its event."""
        while (event := self.find_next_event()) is not None:
            event.synchronize()
            self.report_next()


class CudaLayerReporter:
    """A LayerReporter that copies nothing: layers are read in device memory.

    Those who read them get an event for each layer as soon as all is launched. They are reported
    after the last layers of the groups.
    """

    def __init__(self, on_layer: LayerCallback, on_saved: Callable[[int], None]) -> None:
        self._on_layer = on_layer
        self._queued = _QueuedLayers(on_saved)
        self._layer_ends: list[torch.cuda.Event] = []  # of layers 0, 1, ...
        on_layer.on_launching()

    def on_layer_written(self, layer: int) -> None:
        computed = torch.cuda.Event()
        computed.record()
        self._layer_ends.append(computed)

    def end_launch(self) -> None:
        for layer, computed in enumerate(self._layer_ends):
            if self._on_layer.ends_group(layer):
                self._queued.events[layer] = computed
        self._on_layer.on_launched(self._layer_ends)

    def measure_copy_wait(self) -> float:
        return 0.0

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        try:
            yield
            self._queued.report_rest()
        except BaseException:  # the blocks of a step that failed may get another owner
            torch.cuda.current_stream().synchronize()
            raise


class CudaLayerSaver:
    """Copies layers to host memory on a stream of its own, so that no kernel waits for a copy."""

    _stream: torch.cuda.Stream | None = None

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        blocks: torch.Tensor,  # int32 [n]
        on_saved: Callable[[int], None],
    ) -> None:
        self._device, self._host, self._blocks = device, host, blocks
        self._queued = _QueuedLayers(on_saved)
        if CudaLayerSaver._stream is None:
            CudaLayerSaver._stream = torch.cuda.Stream()
        self._side = CudaLayerSaver._stream
        self._side.wait_stream(torch.cuda.current_stream())
        self._computed = torch.cuda.Event(enable_timing=True)

    def on_layer_written(self, layer: int) -> None:
        written = torch.cuda.Event()
        written.record()
        with torch.cuda.stream(self._side):
            self._side.wait_event(written)
            copy_blocks_between(self._device, self._host, self._blocks, layer)
            saved = self._queued.events[layer] = torch.cuda.Event(enable_timing=True)
            saved.record()
        while (event := self._queued.find_next_event()) is not None and event.query():
            self._queued.report_next()

    def end_launch(self) -> None:
        """Layers are reported once they are copied."""

    def measure_copy_wait(self) -> float:
        saved = self._queued.events
        if not saved or not self._computed.query():
            return 0.0  # the copies have ended first
        milliseconds: float = self._computed.elapsed_time(saved[max(saved)])
        return max(0.0, milliseconds * 1e-3)

    @contextmanager
    def finished_at_exit(self) -> Iterator[None]:
        try:
            yield
            self._computed.record()
            self._queued.report_rest()
        finally:
            # The next step of this stream may overwrite what is being copied.
            self._side.synchronize()
