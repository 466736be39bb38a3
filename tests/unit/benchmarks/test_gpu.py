"""The command of the GPU benchmark: what it refuses, what it leaves out, and what it writes."""

import argparse
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command_line
from benchmarks import gpu
from benchmarks.device.section_run import SectionRun, TimeIsUp
from benchmarks.figures.report import HardwareMissing
from tests.unit.benchmarks.device.tiny_run import RATES, make_tiny_run

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@WITHOUT_GPU
def test_without_a_gpu_one_line_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["gpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: benchmark gpu needs an NVIDIA GPU, and torch sees none here\n"
    assert captured.out == ""


@WITHOUT_GPU
def test_all_benchmarks_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "BENCHMARK_MODULES", {"gpu": "benchmarks.gpu"})
    assert command_line.main(["all"]) == 0
    assert capsys.readouterr().err.startswith("SKIPPED gpu: benchmark gpu needs an NVIDIA GPU")


def test_a_cpu_can_only_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["gpu", "--device", "cpu"]) == 2
    assert "--only served" in capsys.readouterr().err


def test_sections_are_chosen_in_their_order() -> None:
    assert gpu.choose_sections("") == ["limits", "kernels", "engine", "fp8", "served"]
    assert gpu.choose_sections("served,limits") == ["limits", "served"]
    with pytest.raises(ValueError, match="--only speed: the sections are limits, kernels"):
        gpu.choose_sections("limits,speed")


def test_the_plan_is_below_nine_minutes() -> None:
    assert gpu.DEFAULT_SECONDS < 9 * 60


def test_triton_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HardwareMissing, match="needs triton"):
        gpu.require_hardware("cuda", ["limits"])


def test_a_folder_with_weights_is_loaded_and_one_without_has_random_ones(tmp_path: Path) -> None:
    shape = gpu.find_model("tiny", tmp_path / "shape")
    assert shape.load_format == "dummy"
    (shape.folder / "model.safetensors").touch()
    assert gpu.find_model(str(shape.folder), tmp_path).load_format == "auto"


def measure_and_fail(run: SectionRun) -> Callable[[], None]:
    def measure() -> None:
        run.add_row("read", 1.0, "GB/s")
        raise RuntimeError("the kernel is wrong")

    return measure


def test_a_section_that_fails_leaves_its_figures_and_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_tiny_run(tmp_path)
    assert not gpu.run_section(run, "engine", measure_and_fail(run))
    assert gpu.run_section(run, "kernels", lambda: run.add_row("norm", 2.0, "us"))
    assert [row.name for row in run.rows] == ["gpu/engine/read", "gpu/kernels/norm"]
    assert run.notes == ["engine: failed: RuntimeError: the kernel is wrong"]
    assert "Traceback" in capsys.readouterr().err


def test_a_section_whose_time_is_up_has_not_failed(tmp_path: Path) -> None:
    def measure() -> None:
        raise TimeIsUp

    run = make_tiny_run(tmp_path)
    assert gpu.run_section(run, "engine", measure)
    assert run.notes == ["engine: the time of this section was up before its end"]


def test_figures_of_an_incomplete_run_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(
        run: SectionRun, names: list[str], options: argparse.Namespace
    ) -> dict[str, Callable[[], None]]:
        return {"served": measure_and_fail(run)}

    monkeypatch.setattr(gpu, "plan_sections", plan)
    path = tmp_path / "figures.json"
    words = ["gpu", "--device", "cpu", "--only", "served", "--model", "tiny", "--json", str(path)]
    assert command_line.main(words) == 1
    assert "error: these sections failed: served" in capsys.readouterr().err
    (row,) = json.loads(path.read_text())
    assert row.keys() == {"name", "value", "unit", "limit", "share", "command", "note"}
    assert row["name"] == "gpu/served/read"


def test_rates_are_measured_first_whatever_is_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_rates(run: SectionRun) -> None:
        run.rates = RATES
        run.add_row("read", 4000.0, "GB/s")

    def measure(run: SectionRun) -> None:
        run.add_row("norm", 3000.0, "GB/s", run.known_rates.read_bytes / 1e9, "a note")

    monkeypatch.setattr(gpu, "require_hardware", lambda device, names: None)
    monkeypatch.setitem(sys.modules, "benchmarks.device.limits", Mock(measure_rates=measure_rates))
    monkeypatch.setitem(sys.modules, "benchmarks.device.kernel_shares", Mock(measure=measure))
    assert command_line.main(["gpu", "--only", "kernels", "--model", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "at most 520 s: kernels 520 s" in shown
    assert shown.index("gpu/limits/read") < shown.index("gpu/kernels/norm")
    assert "75%" in shown
    assert "a note" in shown


@pytest.mark.slow
def test_clusters_are_started_and_measured(tmp_path: Path) -> None:
    options = argparse.Namespace(
        only="served",
        seconds=100.0,
        model="tiny",
        device="cpu",
        rows="16/4:1,2",
        rounds=2,
        served_1p1d=True,
        vllm="",
        set=["max-batched-tokens=128"],
    )
    output = io.StringIO()
    rows = gpu.main(options, Console(file=output, width=160), "some command")
    names = {row.name.removeprefix("gpu/served/") for row in rows}
    figures = {"ttft", "tpot", "longest_gap", "tokens"}
    cells = ("16_4_c1", "16_4_c1_sampled", "16_4_c2")
    for system in ("colocated", "1p1d"):
        assert {f"{system}/{cell}/{figure}" for cell in cells for figure in figures} < names
        assert {f"{system}/start", f"{system}/16_4_c1_sampled/tokens_of_greedy"} < names
    assert all(row.value > 0 and not row.note.startswith("failed") for row in rows)
    assert "left out" not in output.getvalue()


@pytest.mark.slow
def test_a_cluster_that_does_not_start_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gpu", "--device", "cpu", "--only", "served", "--model", "tiny", "--rows", "16/4:1"]
    assert command_line.main([*words, "--set", "max-batched-tokens=16"]) == 1
    captured = capsys.readouterr()
    assert "left out: served: colocated does not start: max_batched_tokens is 16" in captured.out
    assert "error: these sections failed: served" in captured.err
