"""GpuEngine in Triton's interpreter, in a process of its own, against transformers and ModelEngine.

tests/gpu has the same comparisons on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.models import FamilyName, StablePrompt, build_model, find_stable_prompts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[5]
# Prompt lengths, in tokens. `mixed` has windows and gets all other comparisons, `qwen3` QK norm.
LENGTHS: dict[FamilyName, tuple[int, ...]] = {"mixed": (1, 16, 17, 50), "qwen3": (1, 18)}
COUNT = 5


@dataclass(frozen=True, slots=True)
class Computed:
    """What GpuEngine computed, and what transformers generates."""

    results: dict[str, Any]
    prompts: dict[FamilyName, list[StablePrompt]]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    pytest.importorskip("triton")
    root = tmp_path_factory.getbasetemp() / "models"
    folders = {family: build_model(family, root) for family in LENGTHS}
    prompts = {
        family: find_stable_prompts(folder, LENGTHS[family], COUNT)
        for family, folder in folders.items()
    }
    models = {
        family: {
            "folder": str(folders[family]),
            "prompts": [stable.prompt for stable in found],
            "count": COUNT,
        }
        for family, found in prompts.items()
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_interpreter.py"))],
        input=json.dumps(models),
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return Computed(json.loads(done.stdout), prompts)


@pytest.mark.parametrize("family", LENGTHS)
def test_tokens_of_mixed_steps_equal_transformers(computed: Computed, family: FamilyName) -> None:
    assert computed.results[f"{family} tokens"] == [
        list(stable.reference_tokens) for stable in computed.prompts[family]
    ]


def test_decode_continues_from_announced_layers(computed: Computed) -> None:
    wanted = computed.prompts["mixed"][-1].reference_tokens
    assert computed.results["handoff"] == list(wanted)


def test_saved_blocks_equal_announced_ones(computed: Computed) -> None:
    assert computed.results["is_saved"] is True


def test_steps_that_run_ahead_change_no_token(computed: Computed) -> None:
    """Sequences join while a step that was launched ahead is computed, and end one by one."""
    found = computed.results["run_ahead"]
    assert found["ahead"] == found["eager"]
    launches = [(bucket, continues) for bucket, continues in found["launches"]]
    assert {bucket for bucket, _ in launches} == {1, 2, 4}
    assert sum(continues for _, continues in launches) > len(launches) / 2


def test_slice_is_deferred_until_its_blocks_are_loaded(computed: Computed) -> None:
    load = computed.results["load"]
    token = computed.prompts["mixed"][-2].reference_tokens[0]
    assert load["is_deferred"] == [False, True, False]
    assert load["tokens"] == [token, None, token]


def test_special_rows_equal_those_of_the_model_engine(computed: Computed) -> None:
    """Logit bias, penalties, logprobs of outputs and of prompts."""
    (tokens, logprobs), (wanted_tokens, wanted_logprobs) = (
        computed.results["special"],
        computed.results["wanted_special"],
    )
    assert tokens == wanted_tokens
    assert len(logprobs) > 80
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


def test_copied_block_continues_the_prefix_after_a_warm_up(computed: Computed) -> None:
    """The warm-up could capture no graphs, so that the engine launches every kernel by itself."""
    assert computed.results["has_graphs"] is False
    wanted = computed.prompts["mixed"][LENGTHS["mixed"].index(16)].reference_tokens
    assert computed.results["copied"] == list(wanted)


def test_damaged_cache_is_reported(computed: Computed) -> None:
    assert computed.results["is_damage_reported"] is True
