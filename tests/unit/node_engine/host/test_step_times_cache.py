"""A restart uses the measurements of an equal start, and of no other."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.node_config import NO_WEIGHT_CACHE, NodeConfig
from baton.kv.blocks import KVLayout
from baton.models.model_identity import ModelIdentity
from baton.process.clock import FakeClock
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.engine import ComputeDevice, Engine
from node_engine.core.step.step_batch import StepBatch
from node_engine.host import step_times_cache
from node_engine.host.engine_measurement import measure_engine
from node_engine.host.step_times_cache import MAX_AGE_SECONDS, StepTimesCache

TIMES = [0.25, 0.5]
KEY: dict[str, object] = {"model": "a", "threads": "2"}
LAYOUT = KVLayout(2, 2, 8, 16, "float32")
LIMITS = StepLimits(max_num_seqs=4, max_batched_tokens=256)


def open_cache(folder: Path, key: dict[str, object], age: float = 1.0) -> StepTimesCache:
    """The cache as it is seen `age` seconds after its newest file was written."""
    written = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
    return StepTimesCache(folder, key, lambda: written + age)


def test_times_are_found_again(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, KEY)
    assert cache.find_times() is None
    cache.save_times(TIMES)
    assert open_cache(tmp_path, KEY).find_times() == TIMES
    assert open_cache(tmp_path, {**KEY, "threads": "1"}).find_times() is None


@pytest.mark.parametrize("age", [MAX_AGE_SECONDS + 1.0, -1.0])
def test_old_times_are_measured_again(tmp_path: Path, age: float) -> None:
    open_cache(tmp_path, KEY).save_times(TIMES)
    assert open_cache(tmp_path, KEY, age).find_times() is None


@pytest.mark.parametrize("content", [b"[", b"{}", b"[1]", b"[NaN]", b"[-1.0]", b'["1.0"]'])
def test_what_are_no_times_is_not_used(tmp_path: Path, content: bytes) -> None:
    cache = open_cache(tmp_path, KEY)
    cache._files.write(json.dumps(KEY, sort_keys=True), content)
    assert open_cache(tmp_path, KEY).find_times() is None


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    cache = StepTimesCache(tmp_path / "gone", KEY)
    cache.save_times(TIMES)
    assert cache.find_times() is None


@dataclass
class TimedEngine:
    """Each step takes a millisecond a token."""

    clock: FakeClock = field(default_factory=FakeClock)
    steps: list[int] = field(default_factory=list)
    compute_device: ComputeDevice = field(default_factory=ComputeDevice)
    model_size: object = "a model"
    max_model_len: int = 512
    layout: KVLayout = LAYOUT
    model_digest: str = "aa"

    @property
    def model_identity(self) -> ModelIdentity:
        return ModelIdentity("native", self.model_digest, "float32", "none", LAYOUT, 100, (1,))

    def run(self, batch: StepBatch) -> None:
        self.steps.append(batch.num_tokens)
        self.clock.advance(batch.num_tokens / 1000)


def measure(config: NodeConfig, engine: TimedEngine, limits: StepLimits = LIMITS) -> list[Any]:
    return measure_engine(config, cast(Engine, engine), 64, limits, engine.clock)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    (tmp_path / "cache").mkdir()
    return NodeConfig(
        model="m", weight_cache_dir=str(tmp_path / "cache"), segment_dir=str(tmp_path)
    )


def test_an_equal_start_measures_nothing(config: NodeConfig) -> None:
    first, second = TimedEngine(), TimedEngine()
    measured = measure(config, first)
    assert first.steps == [1, 1, 64, 128]
    assert measure(config, second) == measured
    assert second.steps == []


@pytest.mark.parametrize(
    ("changes", "limits", "digest"),
    [
        ({"threads": "7"}, LIMITS, "aa"),
        ({"weight_cache_dir": NO_WEIGHT_CACHE}, LIMITS, "aa"),
        ({}, replace(LIMITS, max_batched_tokens=128), "aa"),
        ({}, LIMITS, "bb"),
    ],
)
def test_another_start_measures_again(
    config: NodeConfig, changes: dict[str, Any], limits: StepLimits, digest: str
) -> None:
    measure(config, TimedEngine())
    engine = TimedEngine(model_digest=digest)
    measure(replace(config, **changes), engine, limits)
    assert engine.steps[:3] == [1, 1, 64]


def test_times_of_too_few_steps_are_completed(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_times_cache.StepTimesCache, "find_times", lambda _: [0.001, 0.001])
    engine = TimedEngine()
    measured = measure(config, engine)
    assert engine.steps == [64, 128]
    assert [step.seconds for step in measured] == pytest.approx([0.001, 0.001, 0.064, 0.128])
