"""A node that cannot compute its model ends with one line that says why, and what to do."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from baton.config.settings import Config
from baton.errors import ConfigError, NodeFailed
from baton.process.runtime import EXIT_USAGE
from baton.types import Role
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.device_memory import DeviceMemoryProfile
from node_engine.core.step.engine import DeviceLost
from node_engine.host import assemble
from node_engine.host.assemble import choose_step_limits, create_arena, run_node
from node_engine.model.config.model_config import load_model_config
from node_engine.model.loading.weight_memory import compute_weight_bytes, report_too_large_model
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PacedEngine
from node_engine.structured_output import constraint_factory
from tests.models import build_model

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees an NVIDIA GPU here")
def test_cuda_without_a_driver(tmp_path: Path) -> None:
    flags = ["--coordinator", "127.0.0.1:1", "--device", "cuda", "--model", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-m", "decode_node", *flags, "--segment-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == EXIT_USAGE
    [line] = [line for line in ended.stderr.splitlines() if "error" in line]
    assert "torch sees no NVIDIA GPU here: use --device cpu" in line
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FULL, ConfigError, "does not fit into the memory of the machine: its weights need"),
        (torch.AcceleratorError("CUDA error: unknown error\nhints"), NodeFailed, "unknown error$"),
    ],
)
async def test_failure_while_weights_are_loaded(
    error: Exception,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("node_engine.model.model_loader.load_weights", fail)
    with pytest.raises(kind, match=message):
        await run_node(make_config(tmp_path, "torch"), Role.DECODE, asyncio.Event())


async def test_memory_runs_out_while_the_native_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for a model on 1 threads")

    monkeypatch.setattr("node_engine.model.cpu.native_loader.build_native_model", fail)
    with pytest.raises(ConfigError, match="does not fit into the memory of the machine"):
        await run_node(make_config(tmp_path, "native"), Role.DECODE, asyncio.Event())


def make_config(folder: Path, cpu_kernels: Literal["native", "torch"]) -> Config:
    return Config(
        coordinator="127.0.0.1:1",
        model=str(build_model("llama", folder)),
        device="cpu",
        cpu_kernels=cpu_kernels,
        segment_dir=str(folder),
    )


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [("float32", "use --dtype bfloat16, a smaller"), ("bfloat16", "use a smaller")],
)
def test_a_model_beyond_a_gpu_is_reported_with_figures(
    dtype: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise FULL

    config = load_model_config(build_model("llama", tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 << 30, 8 << 30))
    with (
        pytest.raises(ConfigError) as caught,
        report_too_large_model(config, dtype, torch.device("cuda")),
    ):
        fail()
    message = str(caught.value)
    assert f"need {compute_weight_bytes(config, dtype)} bytes" in message
    assert f"in {dtype}: 5.0GiB of 8.0GiB were free" in message
    assert fix in message


def test_weight_bytes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = build_model("llama", tmp_path)
    config = load_model_config(folder)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed = compute_weight_bytes(config, "float32")
    assert needed <= stored < needed + (1 << 16)  # a header with the names
    assert compute_weight_bytes(config, "bfloat16") == needed // 2


async def test_contradicting_limits_are_refused_before_loading(tmp_path: Path) -> None:
    config = Config(
        coordinator="127.0.0.1:1",
        model="/nowhere",
        device="cpu",
        max_num_seqs=64,
        max_batched_tokens=32,
        segment_dir=str(tmp_path),
    )
    with pytest.raises(ConfigError, match="raise --max-batched-tokens or lower --max-num-seqs"):
        await run_node(config, Role.DECODE, asyncio.Event())


def profile_of(gibibytes: int) -> DeviceMemoryProfile:
    return DeviceMemoryProfile(gibibytes << 30, gibibytes << 30, 0, 0, 0)


def test_arena_of_a_gpu_is_sized_by_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    profiled: list[tuple[StepLimits, int]] = []

    def profile(engine: object, limits: StepLimits, num_graphs: int) -> DeviceMemoryProfile:
        profiled.append((limits, num_graphs))
        return profile_of(2)

    monkeypatch.setattr("node_engine.model.gpu.memory_profile.profile_device_memory", profile)
    config = Config(kv_memory="0.015625", segment_dir=str(tmp_path))
    from node_engine.model.gpu.decode_graphs import list_buckets
    from node_engine.model.gpu.layer_graphs import list_token_buckets

    limits, engine = StepLimits(4, 64), PacedEngine(ZERO_COSTS)
    arena = create_arena(config, "cuda", limits, engine)
    try:
        assert arena.num_blocks == (32 << 20) // engine.layout.block_bytes
        assert profiled == [(limits, len(list_buckets(4)) + len(list_token_buckets(64)))]
    finally:
        arena.close()


def test_gpu_that_fails_while_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def profile(*_: object) -> DeviceMemoryProfile:
        raise DeviceLost("CUDA error: unknown error\nhints")

    monkeypatch.setattr("node_engine.model.gpu.memory_profile.profile_device_memory", profile)
    with pytest.raises(NodeFailed, match=r"the GPU failed at start: CUDA error: unknown error$"):
        create_arena(
            Config(segment_dir=str(tmp_path)), "cuda", StepLimits(4, 64), PacedEngine(ZERO_COSTS)
        )


def test_a_gpu_has_no_speculative_decoding() -> None:
    config = Config(speculative="ngram", speculative_tokens=6)
    with pytest.raises(ConfigError, match=r"is for CPUs.*--speculative none or --device cpu"):
        choose_step_limits(config, Role.DECODE, "cuda")
    assert choose_step_limits(config, Role.DECODE, "cpu").max_draft_tokens == 6
    assert choose_step_limits(Config(), Role.DECODE, "cuda").max_draft_tokens == 0


async def test_a_start_that_fails_leaves_no_thread_of_grammars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class WatchedFactory:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start_tokenizer_loading(self) -> None:
            pass

        def close(self) -> None:
            closed.append("grammars")

    def fail(*_: object) -> None:
        raise ConfigError("the weights are damaged")

    monkeypatch.setattr(constraint_factory, "ConstraintFactory", WatchedFactory)
    monkeypatch.setattr(assemble, "build_engine", fail)
    model = build_model("llama", tmp_path)
    (model / "tokenizer.json").write_text("{}")
    config = Config(coordinator="127.0.0.1:1", model=str(model), segment_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="damaged"):
        await run_node(config, Role.DECODE, asyncio.Event())
    assert closed == ["grammars"]


async def test_a_bad_cache_size_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = Config(coordinator="127.0.0.1:1", model=str(tmp_path), weight_cache_size="much")
    with pytest.raises(ConfigError, match="weight_cache_size"):
        await run_node(config, Role.DECODE, asyncio.Event())
