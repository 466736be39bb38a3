"""The section `kernels`, run by Triton's interpreter in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


def test_every_kernel_has_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    program = Path(__file__).with_name("kernels_interpreter.py")
    command = [sys.executable, "-W", "ignore::RuntimeWarning", str(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    shares = {row["name"].removeprefix("gpu/kernels/"): row["share"] for row in rows}
    bound = [name for name, share in shares.items() if share is not None]
    assert bound == [
        *("decode_attention_2_of_40", "prefill_attention_20"),
        *("add_rms_norm_3", "silu_mul_3", "rotate_and_write_3"),
        *("blocks_to_device", "blocks_to_host"),
    ]
    assert [name for name in shares if name not in bound] == [
        *("add_rms_norm_1", "silu_mul_1", "rotate_and_write_1"),
        *(f"sampling_{kind}_{n}" for n in (1, 2) for kind in ("greedy", "top_p", "top_k")),
    ]
    assert all(row["value"] > 0 for row in rows)
