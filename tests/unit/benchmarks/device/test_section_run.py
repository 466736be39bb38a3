"""How sections share the time of a run, and how their figures are kept."""

import time
from pathlib import Path

import pytest

from benchmarks.device.section_run import TimeIsUp, allot_seconds
from tests.unit.benchmarks.device.tiny_run import make_tiny_run


def test_sections_share_the_time_by_weight() -> None:
    assert allot_seconds({"limits": 1.0, "served": 3.0}, 80.0) == {"limits": 20.0, "served": 60.0}


def test_what_a_section_leaves_over_goes_to_the_next_ones(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path, seconds=100.0)
    run.begin_section("engine")
    assert run.seconds_left == pytest.approx(50.0, abs=5.0)
    run.begin_section("kernels")
    assert run.seconds_left == pytest.approx(100.0, abs=10.0)


def test_a_section_without_time_is_cut(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.require_time()
    run.deadline = time.perf_counter() - 1.0
    assert run.seconds_left == 0.0
    with pytest.raises(TimeIsUp):
        run.require_time()


def test_shares_of_rates_and_of_times(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    run.add_row("read", 3.0, "GB/s", 4.0, "a note")
    run.add_time("step", 0.005, least=0.004)
    rate, step = run.list_section_rows()
    assert (rate.name, rate.share, rate.note) == ("gpu/engine/read", 0.75, "a note")
    assert (step.value, step.unit, step.limit) == (5.0, "ms", 4.0)
    assert step.share == pytest.approx(0.8)
    assert step.command == "some command"
    assert run.find_value("engine/step") == 5.0
    assert run.find_value("engine/other") is None


def test_what_is_left_out_is_noted_with_its_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_tiny_run(tmp_path)
    run.leave_out("the engine refuses it")
    assert run.notes == ["engine: the engine refuses it"]
    assert "LEFT OUT: the engine refuses it" in capsys.readouterr().err
