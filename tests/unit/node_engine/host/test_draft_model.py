"""Which draft models a node takes, and how much memory their caches have."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.shared_memory.available_memory import AvailableMemory
from baton.types import Role, SamplingParams
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.speculation.model_drafter import DraftOrder, ModelDrafter
from node_engine.core.step.step_batch import SampleSpec, SequenceId
from node_engine.host.assemble import choose_step_limits, run_node
from node_engine.host.draft_model import CACHE_SHARE, build_drafter, check_draft_settings
from node_engine.host.engine_factory import build_engine
from node_engine.host.host_arena import create_host_arena
from tests.models import build_model

LIMITS = StepLimits(4, 64, max_draft_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.getbasetemp() / "models")


def make_config(model: Path, folder: Path, **settings: Any) -> NodeConfig:
    own: dict[str, Any] = {
        "model": str(model),
        "draft_model": str(model),
        "speculative": "draft",
        "device": "cpu",
        "dtype": "float32",
        "threads": "1",
        "kv_memory": "4MiB",
        "weight_cache_dir": "off",
        "segment_dir": str(folder),
    }
    return NodeConfig(**{**own, **settings})


def load_drafter(config: NodeConfig, role: Role = Role.DECODE) -> tuple[ModelDrafter | None, int]:
    """The draft model beside the served one, and the blocks of the node's cache."""
    engine = build_engine(config, "cpu", LIMITS)
    arena = create_host_arena(config, engine, LIMITS)
    try:
        return build_drafter(config, role, LIMITS, engine, arena), arena.num_blocks
    finally:
        arena.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_model": ""}, "--speculative draft needs a draft model: give --draft-model"),
        ({"speculative": "ngram"}, "needs --speculative draft, and that is ngram"),
        ({"speculative": "none"}, "needs --speculative draft, and that is none"),
        ({"engine": "paced"}, "--speculative draft is for models, and --engine is paced"),
    ],
)
def test_settings_that_do_not_fit_together(
    model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_step_limits(make_config(model, tmp_path, **settings), Role.DECODE, "cpu")
    assert message in str(caught.value)
    check_draft_settings(make_config(model, tmp_path))
    check_draft_settings(NodeConfig(speculative="ngram"))


def test_a_gpu_has_no_draft_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculative draft is for CPUs"):
        choose_step_limits(make_config(model, tmp_path), Role.DECODE, "cuda")


async def test_a_node_ends_with_the_reason(model: Path, tmp_path: Path) -> None:
    config = make_config(
        model, tmp_path, draft_model=str(tmp_path / "none"), coordinator="127.0.0.1:1"
    )
    with pytest.raises(ConfigError) as caught:
        await run_node(config, Role.DECODE, asyncio.Event())
    assert str(caught.value).startswith(f"--draft-model {tmp_path / 'none'}: there is no such")


def test_a_model_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"][0]["content"] = "<|another|>"
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another vocabulary than the model"):
        load_drafter(make_config(model, tmp_path, draft_model=str(other)))
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer.json is no tokenizer"):
        load_drafter(make_config(model, tmp_path, draft_model=str(other)))


def test_a_model_that_cannot_be_served_is_named(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "config.json").write_text(json.dumps({"architectures": ["Unknown"]}))
    with pytest.raises(ConfigError, match=r"--draft-model .*other: architectures \['Unknown'\]"):
        load_drafter(make_config(model, tmp_path, draft_model=str(other)))


def test_a_prefill_node_loads_none(model: Path, tmp_path: Path) -> None:
    assert load_drafter(make_config(model, tmp_path), Role.PREFILL)[0] is None
    plain = make_config(model, tmp_path, speculative="none", draft_model="")
    assert load_drafter(plain)[0] is None


def test_the_cache_is_a_part_of_the_nodes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model, tmp_path)
    drafter, num_blocks = load_drafter(config)
    assert drafter is not None
    assert drafter.num_free_blocks == num_blocks // CACHE_SHARE
    monkeypatch.setattr(
        "node_engine.host.draft_model.measure_private_memory",
        lambda: AvailableMemory(1000, "left in a test", 0),
    )
    with pytest.raises(ConfigError, match=r"bytes, and 1000 are usable \(left in a test\)"):
        load_drafter(config)


@pytest.mark.parametrize("error", [MemoryError(), IndexError("out of range"), RuntimeError("x")])
def test_no_error_of_the_draft_model_ends_the_node(
    model: Path, tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, _ = load_drafter(make_config(model, tmp_path))
    assert drafter is not None

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("node_engine.model.cpu.native_engine.NativeEngine.run", fail)
    params = SamplingParams(1, temperature=0.0)
    order = DraftOrder(SequenceId(0), [1, 2], lambda: True, 2, lambda _: SampleSpec(params, 0, 2))
    assert drafter.draft_tokens([order]) == [[]]
    assert drafter.count_possible_tokens(2) == 0, "it is not used any more"
