"""The steady clock. Pure cores take `now` as an argument; shells read it here."""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds on a steady clock with an arbitrary origin

monotonic_clock: Clock = time.monotonic


class FakeClock:
    """A clock that a test advances."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
