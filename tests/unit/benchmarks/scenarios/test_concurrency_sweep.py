"""The ceiling of a sweep, and its picture."""

import sys
from pathlib import Path

import pytest

from baton.slo import Slo
from benchmarks.load.measurement import RequestMeasurement, evaluate_cell
from benchmarks.scenarios.concurrency_sweep import (
    SweepPoint,
    check_plot_path,
    describe_ceiling,
    find_ceiling,
    plot_sweep,
)


def point(concurrency: int, ttft: float, tokens: int, error: str = "") -> SweepPoint:
    """Ten requests of one second each."""
    seen = [
        RequestMeasurement(0.0, tokens, [(ttft, 1), (1.0, tokens)], ended_at=1.0) for _ in range(10)
    ]
    if error:
        seen.append(RequestMeasurement(0.0, tokens, error=error))
    return SweepPoint(concurrency, evaluate_cell(f"c{concurrency}", seen, Slo()))


POINTS = [
    point(1, 0.1, 10),
    point(2, 0.2, 18),
    point(4, 0.3, 30),
    point(8, 0.3, 40, "timeout"),
    point(16, 0.9, 35),
]


def test_the_ceiling_is_the_best_point_within_the_bound() -> None:
    found = find_ceiling(POINTS, 0.5)
    assert found is not None
    assert found.concurrency == 4
    assert "310.0 tokens/s, 10.00 requests/s at concurrency 4 (p90 300.0 ms)" in describe_ceiling(
        POINTS, 0.5
    )


def test_no_point_may_hold_the_bound() -> None:
    assert find_ceiling(POINTS, 0.01) is None
    assert (
        describe_ceiling(POINTS, 0.01) == "no point of the sweep keeps the p90 of TTFT within 10 ms"
    )
    nothing = SweepPoint(1, evaluate_cell("c1", [], Slo()))
    assert find_ceiling([nothing], 1.0) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "magic"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
@pytest.mark.parametrize("bound", [None, 0.5, 0.01])
def test_the_picture(tmp_path: Path, name: str, magic: bytes, bound: float | None) -> None:
    path = tmp_path / name
    check_plot_path(path)
    plot_sweep([*POINTS, SweepPoint(32, evaluate_cell("c32", [], Slo()))], bound, path, "a sweep")
    assert path.read_bytes().startswith(magic)


def test_what_stands_in_the_way_of_a_picture_is_told_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"a.txt: .* ends in .svg or .png"):
        check_plot_path(Path("a.txt"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install"):
        check_plot_path(Path("a.svg"))
