"""By how much a step on a GPU is slowed, on clocks that the test advances."""

from dataclasses import dataclass, field

from baton.process.clock import FakeClock
from node_engine.model.gpu.step_slowdown import StepSlowdown
from tests.layer_callbacks import FunctionCallback


@dataclass
class Clocks:
    """The time, and the CPU time of the thread."""

    wall: FakeClock = field(default_factory=FakeClock)
    cpu: FakeClock = field(default_factory=FakeClock)

    def compute(self, seconds: float) -> None:
        self.wall.advance(seconds)
        self.cpu.advance(seconds)

    def wait(self, seconds: float) -> None:
        self.wall.advance(seconds)


def test_callbacks_of_the_launch_and_waits_of_the_thread_slow_a_step() -> None:
    clocks = Clocks()

    def announce(layer: int) -> None:
        clocks.compute(0.25)
        clocks.wait(0.5)

    callback = FunctionCallback(announce, slowed_seconds=4.0)
    slowdown = StepSlowdown(callback, clocks.wall, clocks.cpu)
    clocks.compute(8.0)  # launching is no wait
    slowdown.report_layer(0)
    clocks.wait(1.0)  # another thread has Python's lock
    slowdown.report_layer(1)
    slowdown.end_launch()
    slowdown.end_step(0.125)
    assert callback.slowed_seconds == 4.0 + 2 * (0.25 + 0.5) + 1.0 + 0.125


def test_callbacks_after_the_launch_do_not() -> None:
    """The device still computes, and who waits for it may as well announce layers."""
    clocks, seen = Clocks(), list[int]()

    def announce(layer: int) -> None:
        seen.append(layer)
        clocks.compute(0.25)

    callback = FunctionCallback(announce)
    slowdown = StepSlowdown(callback, clocks.wall, clocks.cpu)
    clocks.compute(1.0)
    slowdown.end_launch()
    slowdown.report_layer(0)
    slowdown.end_step(0.0)
    assert (seen, callback.slowed_seconds) == ([0], 0.0)
