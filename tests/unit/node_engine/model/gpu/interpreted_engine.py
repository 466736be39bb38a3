"""Runs engine_interpreter.py: GpuEngine in Triton's interpreter, in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.models import FamilyName, StablePrompt, build_model, find_stable_prompts

ROOT = Path(__file__).parents[5]
# Prompt lengths, in tokens. `mixed` has windows and gets all other comparisons, `qwen3` QK norm.
LENGTHS: dict[FamilyName, tuple[int, ...]] = {"mixed": (1, 16, 17, 41), "qwen3": (1, 18)}
COUNT = 5


@dataclass(frozen=True, slots=True)
class Computed:
    """What GpuEngine computed, and what transformers generates."""

    results: dict[str, Any]
    prompts: dict[FamilyName, list[StablePrompt]]


def run_interpreter(
    part: Literal["plain", "fp8"], tmp_path_factory: pytest.TempPathFactory
) -> Computed:
    """Run one part of the program, which takes a minute."""
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
        [sys.executable, str(Path(__file__).with_name("engine_interpreter.py")), part],
        input=json.dumps(models),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return Computed(json.loads(done.stdout), prompts)
