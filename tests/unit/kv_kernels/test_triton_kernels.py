"""The Triton kernels, run by Triton's interpreter in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.torch_kernels import TorchKernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# fp16, bf16: the query, the weights of the softmax and the result are rounded to 11 or 8 bits each.
TOLERANCE = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    command = [
        sys.executable,
        "-W",
        "error",
        str(Path(__file__).with_name("triton_interpreter.py")),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(
    "case", ["grouped", "several splits", "odd sizes", "windowed", "windowed over splits"]
)
def test_paged_decode_equals_the_reference(errors: dict[str, float], case: str, kind: str) -> None:
    assert errors[f"decode {case} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
def test_kv_write_equals_the_reference(errors: dict[str, float], kind: str) -> None:
    assert errors[f"write {kind}"] == 0.0


def test_the_cpu_gets_the_reference() -> None:
    assert type(kernels_for(torch.device("cpu"))) is TorchKernels
