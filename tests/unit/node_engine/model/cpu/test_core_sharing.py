"""Engines that share cores: their results are the same, and the page says what they compute."""

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest

from node_engine.core.step.step_batch import StepBatch
from tests.unit.node_engine.model.cpu.native_engines import (
    CONFIG,
    BoundEngine,
    make_native,
    make_prompt,
    make_slice,
    needs_native_kernels,
    run_all,
)

pytestmark = needs_native_kernels

SLOT_BYTES = 64


@dataclass(frozen=True, eq=False)
class Slot:
    slot: int
    page: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, mmap.PAGESIZE))
    cores: int = 2

    @property
    def address(self) -> int:
        return np.frombuffer(self.page, np.uint8).ctypes.data

    def read_busy_seconds(self) -> float:
        """Seconds until other nodes take this one as idle."""
        start = self.slot * SLOT_BYTES
        until = int.from_bytes(self.page[start : start + 8], "little")
        return max(0.0, until * 1e-6 - time.monotonic())


class Observer:
    """A layer callback that notes what the page says during a step, and may fail."""

    slowed_seconds = 0.0
    blocks = ()

    def __init__(self, slot: Slot, *, fails: bool = False) -> None:
        self._slot = slot
        self._fails = fails
        self.seen: list[float] = []

    def ends_group(self, layer: int) -> bool:
        return False

    def on_launching(self) -> None: ...

    def on_launched(self, layer_ends: object) -> None: ...

    def __call__(self, layer: int) -> None:
        self.seen.append(self._slot.read_busy_seconds())
        if self._fails:
            raise RuntimeError("of a test")


def make_sharing(slot: Slot) -> BoundEngine:
    return make_native(CONFIG, core_sharing=slot)


def test_engines_that_compute_at_once_share_cores_and_give_equal_results() -> None:
    expected = run_all(make_native(CONFIG))
    page = mmap.mmap(-1, mmap.PAGESIZE)
    engines = [make_sharing(Slot(number, page)) for number in range(3)]
    with ThreadPoolExecutor(len(engines)) as threads:
        for _ in range(5):
            for found in threads.map(run_all, engines):
                assert found == expected


@pytest.mark.parametrize("length", [1, 100])  # a decode step, and one that is cut
def test_page_says_that_a_step_is_computed_and_that_it_has_ended(length: int) -> None:
    slot = Slot(5)
    engine = make_sharing(slot).engine
    assert slot.read_busy_seconds() == 0
    observer = Observer(slot)
    engine.run(StepBatch((make_slice(0, make_prompt(length), 0),)), observer)
    assert all(0.1 < seconds <= 2 for seconds in observer.seen)
    assert len(observer.seen) == CONFIG.num_layers
    assert slot.read_busy_seconds() <= 0.02


def test_step_that_fails_does_not_hold_cores() -> None:
    slot = Slot(1)
    engine = make_sharing(slot).engine
    step = StepBatch((make_slice(0, [1, 2], 0),))
    with pytest.raises(RuntimeError, match="of a test"):
        engine.run(step, Observer(slot, fails=True))
    assert slot.read_busy_seconds() <= 0.02
    with pytest.raises(ValueError, match="out of bounds"):
        engine.run(StepBatch((make_slice(0, [10**6], 0),)))
    assert slot.read_busy_seconds() <= 0.02


def test_node_whose_engine_is_gone_computes_nothing() -> None:
    slot = Slot(2)
    run_all(make_sharing(slot))
    assert slot.read_busy_seconds() == 0
