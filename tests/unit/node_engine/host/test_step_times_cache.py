"""A restart uses the measurements of an equal start, and of no other."""

import importlib.metadata
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.node_config import NO_WEIGHT_CACHE, NodeConfig
from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.models.model_identity import ModelIdentity
from baton.process.clock import FakeClock
from kv_kernels.native.native_library import NoNativeLibrary
from node_engine.core.blocks.block_pool import BackBlocks
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.engine import ComputeDevice, Engine
from node_engine.core.step.step_batch import StepBatch
from node_engine.host import engine_measurement
from node_engine.host.engine_measurement import measure_engine
from node_engine.host.step_times_cache import MAX_AGE_SECONDS, StepTimesCache

TIMES = [(1, 0.25), (64, 0.5)]
KEY: dict[str, object] = {"model": "a", "threads": "2"}
LAYOUT = KVLayout(2, 2, 8, 16, "float32")
LIMITS = StepLimits(max_num_seqs=4, max_batched_tokens=256)


def open_cache(folder: Path, key: dict[str, object], age: float = 1.0) -> StepTimesCache:
    """The cache as it is seen `age` seconds after its newest file was written."""
    written = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
    return StepTimesCache(folder, key, lambda: written + age)


def test_times_are_found_again(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, KEY)
    assert cache.find_times() == []
    cache.save_times(TIMES)
    assert open_cache(tmp_path, KEY).find_times() == TIMES
    assert open_cache(tmp_path, {**KEY, "threads": "1"}).find_times() == []


@pytest.mark.parametrize("age", [MAX_AGE_SECONDS + 1.0, -1.0])
def test_old_times_are_measured_again(tmp_path: Path, age: float) -> None:
    open_cache(tmp_path, KEY).save_times(TIMES)
    assert open_cache(tmp_path, KEY, age).find_times() == []


@pytest.mark.parametrize(
    "content", [b"[", b"{}", b"[1]", b"[[1, NaN]]", b"[[1, -1.0]]", b'[[1, "1.0"]]', b"[[1.0]]"]
)
def test_what_are_no_times_is_not_used(tmp_path: Path, content: bytes) -> None:
    cache = open_cache(tmp_path, KEY)
    cache._files.write(json.dumps(KEY, sort_keys=True), content)
    assert open_cache(tmp_path, KEY).find_times() == []


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    cache = StepTimesCache(tmp_path / "gone", KEY)
    cache.save_times(TIMES)
    assert cache.find_times() == []


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


def measure(
    config: NodeConfig,
    engine: TimedEngine,
    limits: StepLimits = LIMITS,
    back_blocks: BackBlocks = lambda count: 64,
) -> list[Any]:
    return measure_engine(config, cast(Engine, engine), 64, back_blocks, limits, engine.clock)


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
    ("changes", "threads", "digest"),
    [({}, 7, "aa"), ({"weight_cache_dir": NO_WEIGHT_CACHE}, 0, "aa"), ({}, 0, "bb")],
)
def test_another_start_measures_again(
    config: NodeConfig, changes: dict[str, Any], threads: int, digest: str
) -> None:
    measure(config, TimedEngine())
    engine = TimedEngine(compute_device=ComputeDevice(threads=threads), model_digest=digest)
    measure(replace(config, **changes), engine)
    assert engine.steps == [1, 1, 64, 128]


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (engine_measurement, "compute_host_id", "another boot"),
        (engine_measurement, "package_version", "another version"),
        (engine_measurement, "load_library", NoNativeLibrary("it is not built", "build it")),
        (engine_measurement, "count_usable_cores", 99),
        (importlib.metadata, "version", "another torch"),
        (os, "sched_getaffinity", {99}),
    ],
)
def test_another_machine_measures_again(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object
) -> None:
    measure(replace(config, cpu_kernels="auto", threads="2"), TimedEngine())
    monkeypatch.setattr(module, name, lambda *_: value)
    engine = TimedEngine()
    measure(replace(config, cpu_kernels="auto", threads="2"), engine)
    assert engine.steps == [1, 1, 64, 128]


def test_other_limits_measure_what_is_not_known(config: NodeConfig) -> None:
    measure(config, TimedEngine())
    engine = TimedEngine()
    measured = measure(config, engine, replace(LIMITS, max_batched_tokens=100))
    assert engine.steps == [100]
    assert [step.batch.num_tokens for step in measured] == [1, 1, 64, 100]


def test_a_step_is_measured_if_its_blocks_have_memory(config: NodeConfig) -> None:
    """Six blocks have memory, and the others never will. Times that are known need none."""
    engine, counts = TimedEngine(), list[int]()

    def back_blocks(count: int) -> int:
        counts.append(count)
        return 6

    measured = measure(config, engine, LIMITS, back_blocks)
    assert [step.batch.num_tokens for step in measured] == engine.steps == [1, 1, 64]
    assert counts == [1, 1, 4, 8]
    again = TimedEngine()
    assert measure(config, again)[:3] == measured
    assert again.steps == [128]


def test_a_named_folder_that_cannot_be_used_is_an_error(config: NodeConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ConfigError, match="weight_cache_dir"):
        measure(config, TimedEngine())
