"""Runs the section `kernels` in Triton's interpreter and prints its rows as JSON.

It is a program of its own, because TRITON_INTERPRET must be set before a kernel is defined and then
holds for the whole process. The argument is a folder for the model.
"""

import dataclasses
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from pathlib import Path

import torch

from benchmarks.device import kernel_shares
from benchmarks.device.kernel_shares import KernelCases
from node_engine.model.gpu import fused_transformer
from tests.gpu.interpreter_setup import prepare_interpreter
from tests.unit.benchmarks.device.tiny_run import make_tiny_run

# A program of a split takes milliseconds, whether it has work or not.
fused_transformer._DECODE_PROGRAMS = 8
CASES = KernelCases(
    decode=((2, 40),),
    prefill=(20,),
    small_rows=1,
    large_rows=3,
    sampled_rows=(1, 2),
    copied_bytes=1 << 14,
    launches=2,
    rounds=1,
)


def main() -> None:
    prepare_interpreter()
    run = make_tiny_run(Path(sys.argv[1]))
    run.section = "kernels"
    kernel_shares.measure(run, CASES, torch.float32)
    sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in run.rows]))


if __name__ == "__main__":
    main()
