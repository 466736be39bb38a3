"""Idle time and launches, from profiles that are written by hand."""

import pytest

from benchmarks.device.activities import (
    DeviceActivity,
    StepProfile,
    count_launches,
    find_idle_gaps,
)


def make_graph(began: float, correlation: int, kernels: int = 10) -> list[DeviceActivity]:
    """Kernels of a microsecond, with a pause of another one behind each."""
    return [
        DeviceActivity(began + 2e-6 * i, began + (2 * i + 1) * 1e-6, correlation)
        for i in range(kernels)
    ]


def test_steps_are_what_one_launch_has_run() -> None:
    first, second = make_graph(0.0, 1), make_graph(100e-6, 2)
    assert find_idle_gaps([*first, *second]) == [pytest.approx(81e-6)]


def test_copies_between_steps_are_no_idle_time() -> None:
    copies = [
        DeviceActivity(30e-6, 40e-6, 5),
        DeviceActivity(35e-6, 45e-6, 6),  # on another stream, at the same time
        DeviceActivity(18e-6, 20e-6, 7),  # reaches into the pause behind the step
    ]
    activities = [*make_graph(100e-6, 2), *copies, *make_graph(0.0, 1)]
    assert find_idle_gaps(activities) == [pytest.approx((81 - 15 - 1) * 1e-6)]


def test_without_captured_steps_there_are_no_gaps() -> None:
    eager = [DeviceActivity(i * 1e-5, i * 1e-5 + 1e-6, i) for i in range(50)]
    assert find_idle_gaps(eager) == []
    assert find_idle_gaps(make_graph(0.0, 1)) == []


def test_overlapping_steps_leave_no_gap() -> None:
    assert find_idle_gaps([*make_graph(0.0, 1), *make_graph(5e-6, 2)]) == [0.0]


def test_launches_are_those_of_kernels_and_graphs() -> None:
    launches = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch"]
    others = ["cudaMemcpyAsync", "cudaEventRecord", "aten::mm", "cudaStreamSynchronize"]
    assert count_launches([*launches, *others]) == 4
    assert StepProfile(2, (), [*launches, *others]).launches_per_step == 2.0
