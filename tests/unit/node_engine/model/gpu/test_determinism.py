"""`--deterministic` in Triton's interpreter: logits do not depend on what else a step computes.

tests/gpu has the same comparisons on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.model.model_loader import load_model_engine
from tests.models import StablePrompt, build_model, find_stable_prompts

ROOT = Path(__file__).parents[5]
COUNT = 3
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}


@dataclass(frozen=True, slots=True)
class FixedSums:
    """What was computed, and what transformers generates."""

    results: dict[str, Any]
    prompts: list[StablePrompt]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> FixedSums:
    """Of a model with sliding windows."""
    pytest.importorskip("triton")
    folder = build_model("mixed", tmp_path_factory.getbasetemp() / "models")
    prompts = find_stable_prompts(folder, (1, 17), COUNT)
    asked = {
        "folder": str(folder),
        "prompts": [stable.prompt for stable in prompts],
        "count": COUNT,
    }
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("determinism_interpreter.py"))],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return FixedSums(json.loads(done.stdout), prompts)


@pytest.mark.slow
def test_logits_are_equal_bit_by_bit_whatever_else_is_computed(
    computed: FixedSums,
) -> None:
    """Alone, in a batch of five, beside chunks and scored prompts, and in chunks of one or more."""
    assert computed.results["different"] == []


@pytest.mark.slow
def test_steps_that_are_padded_for_graphs_change_no_bit(computed: FixedSums) -> None:
    assert computed.results["is padded equal"] is True


@pytest.mark.slow
def test_logits_in_fp8_are_equal_bit_by_bit_whatever_else_is_computed(
    computed: FixedSums,
) -> None:
    assert computed.results["different in fp8"] == []


@pytest.mark.slow
def test_without_the_setting_logits_depend_on_the_batch(computed: FixedSums) -> None:
    """Otherwise the comparison would show nothing."""
    assert computed.results["different without"] == ["in a batch"]


@pytest.mark.slow
def test_tokens_equal_transformers(computed: FixedSums) -> None:
    assert computed.results["tokens"] == [
        list(stable.reference_tokens) for stable in computed.prompts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("name", ["odd sizes", "several tiles"])
def test_products_equal_the_reference_for_any_number_of_rows(
    computed: FixedSums, name: str, kind: str
) -> None:
    error, different = computed.results[f"product {name} {kind}"]
    assert error < TOLERANCE[kind]
    assert different == []


def test_deterministic_cpu_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deterministic: .*use native kernels .*, --device cuda"):
        load_model_engine(build_model("llama", tmp_path), device="cpu", deterministic=True)


def test_kernels_of_a_cpu_do_not_depend_on_the_setting() -> None:
    assert type(kernels_for(torch.device("cpu"), deterministic=True)) is TorchKernels
