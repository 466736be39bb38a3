"""A run of the GPU benchmark over a tiny model on the CPU, with rates that are made up."""

import io
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.clusters.llama_folders import LLAMA_TINY, write_llama_folder
from benchmarks.device.section_run import MeasuredModel, SectionRun
from benchmarks.device.step_bounds import DeviceRates
from node_engine.model.config.model_config import load_model_config

RATES = DeviceRates(
    read_bytes=4e12, products=8e14, to_device_bytes=5e10, to_host_bytes=5e10
)  # made up


def make_tiny_run(folder: Path, seconds: float = 600.0) -> SectionRun:
    model = write_llama_folder(folder / "model", LLAMA_TINY)
    run = SectionRun(
        model=MeasuredModel(model, load_model_config(model), "dummy"),
        device=torch.device("cpu"),
        console=Console(file=io.StringIO(), width=160),
        command="some command",
        weights={"engine": 1.0, "kernels": 1.0},
        ends_at=time.perf_counter() + seconds,
        rates=RATES,
    )
    run.section, run.deadline = "engine", run.ends_at
    return run
