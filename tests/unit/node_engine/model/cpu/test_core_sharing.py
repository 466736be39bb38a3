"""Engines that share cores: their results are the same, and the page says what they compute."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from node_engine.core.step.step_batch import SampleSpec, StepBatch
from tests.unit.node_engine.model.cpu.native_engines import (
    CONFIG,
    GREEDY,
    BoundEngine,
    make_native,
    make_slice,
    needs_native_kernels,
    run_all,
)

pytestmark = needs_native_kernels

SLOT_BYTES = 64
NONE, DECODES, DECODED, COMPUTES_PROMPT = range(4)  # Activity of core_sharing.h


@dataclass(frozen=True, eq=False)
class Slot:
    slot: int
    page: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, mmap.PAGESIZE))
    cores: int = 2

    @property
    def address(self) -> int:
        return np.frombuffer(self.page, np.uint8).ctypes.data

    def read_activity(self) -> int:
        start = self.slot * SLOT_BYTES
        return int.from_bytes(self.page[start : start + 8], "little") & 3


class Observer:
    """A layer callback that notes what the page says during a step."""

    slowed_seconds = 0.0
    blocks = ()

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.seen: set[int] = set()

    def ends_group(self, layer: int) -> bool:
        return False

    def on_launching(self) -> None: ...

    def on_launched(self, layer_ends: object) -> None: ...

    def __call__(self, layer: int) -> None:
        self.seen.add(self._slot.read_activity())


class FailingObserver(Observer):
    def __call__(self, layer: int) -> None:
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


def test_step_says_what_it_computes_and_when_it_ends() -> None:
    slot = Slot(5)
    engine = make_sharing(slot).engine
    for slices, during, after in (
        ((make_slice(0, [1, 2, 3], 0),), COMPUTES_PROMPT, NONE),
        ((make_slice(0, [4], 3),), DECODES, DECODED),
        ((make_slice(0, [5], 4), make_slice(1, [1, 2], 0)), DECODES, DECODED),
    ):
        observer = Observer(slot)
        engine.run(StepBatch(slices), observer)
        assert observer.seen == {during}
        assert slot.read_activity() == after


def test_drafts_behind_a_token_are_not_a_prompt() -> None:
    slot = Slot(0)
    engine = make_sharing(slot).engine
    engine.run(StepBatch((make_slice(0, [1, 2, 3], 0),)))
    specs = tuple(SampleSpec(GREEDY, 0, position) for position in (5, 6))
    drafted = replace(make_slice(0, [4, 5, 6], 3), draft_specs=specs)
    engine.run(StepBatch((drafted,)))
    assert slot.read_activity() == DECODED


def test_step_that_fails_does_not_hold_cores() -> None:
    slot = Slot(1)
    engine = make_sharing(slot).engine
    for token_ids in ([10**6], [1, 2]):
        with pytest.raises((ValueError, RuntimeError)):
            engine.run(StepBatch((make_slice(0, token_ids, 0),)), FailingObserver(slot))
        assert slot.read_activity() == NONE
