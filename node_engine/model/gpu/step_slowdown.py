"""By how much a GPU step is slowed because others read its layers, without synchronising it."""

import time

from baton.process.clock import Clock, monotonic_clock
from node_engine.core.step.engine import LayerCallback


class StepSlowdown:
    """Measures one step, for `LayerCallback.slowed_seconds`. Three parts are added up:

    - the CPU time of the callbacks that are called while the step is launched,
    - the time of the launch in which the launching thread did not run, because it waited for
      Python's lock or for a core,
    - the time from the end of the step on the device to the end of its last copy.

    Callbacks after the launch take no time of the step, because the device still computes. The
    first two parts are upper bounds where the device has work left from launches before.
    """

    def __init__(
        self,
        on_layer: LayerCallback,
        clock: Clock = monotonic_clock,
        cpu_clock: Clock = time.thread_time,  # CPU time of the calling thread
    ) -> None:
        self._on_layer = on_layer
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._slowed_before = on_layer.slowed_seconds
        self._callback_seconds = 0.0
        self._launch_wait_seconds = 0.0
        self._is_launching = True
        self._started, self._cpu_started = clock(), cpu_clock()

    def report_layer(self, layer: int) -> None:
        """Call the callback."""
        if not self._is_launching:
            self._on_layer(layer)
            return
        started = self._cpu_clock()
        self._on_layer(layer)
        self._callback_seconds += self._cpu_clock() - started

    def end_launch(self) -> None:
        """All of the step is queued."""
        elapsed, cpu = self._clock() - self._started, self._cpu_clock() - self._cpu_started
        self._launch_wait_seconds = max(0.0, elapsed - cpu)
        self._is_launching = False

    def end_step(self, copy_wait_seconds: float) -> None:
        """The copies have ended, the last one so much later than the step on the device."""
        self._on_layer.slowed_seconds = (
            self._slowed_before
            + self._callback_seconds
            + self._launch_wait_seconds
            + copy_wait_seconds
        )
