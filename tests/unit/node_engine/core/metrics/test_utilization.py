"""MFU and MBU of recent steps, and the peak rates of devices by their names."""

import pytest

from baton.types import SamplingParams
from node_engine.core.metrics.device_peaks import KNOWN_DEVICES, DevicePeaks, find_device_peaks
from node_engine.core.metrics.step_costs import StepCosts
from node_engine.core.metrics.utilization import (
    Utilization,
    UtilizationWindow,
    WorkMeter,
    WorkTotals,
    make_step_costs,
)
from node_engine.core.step.engine import ComputeDevice, ModelSize
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedEngine

SIZE = ModelSize(layer_parameters=100, head_parameters=0, attention_width=0, windows=(None,) * 4)
SPEC = SampleSpec(SamplingParams(8), 0, 0)
STEP = StepBatch((SequenceSlice(SequenceId(0), (1,), 0, (), SPEC),))
FLOPS = 2 * 100  # of STEP
BYTES = 4 * 100 + 2 * PACED_LAYOUT.token_bytes  # of STEP: the weights, a token's KV read, written
PEAKS = DevicePeaks(bfloat16_tflops=1, fp8_tflops=2, gigabytes_per_second=1000)


def make_meter() -> WorkMeter:
    return WorkMeter(StepCosts(SIZE, PacedEngine().model_identity))


def test_steps_add_up() -> None:
    meter = make_meter()
    meter.add_step(STEP, 10.0, 10.5)
    meter.add_step(STEP, 10.75, 11.0)
    # the quarter second between the two counts as busy
    assert meter.totals == WorkTotals(2 * FLOPS, 2 * BYTES, 1.0)


def test_a_step_that_was_launched_early_is_not_counted_twice() -> None:
    """Its results are there soon after it was asked for, because it ran during the step before."""
    meter = make_meter()
    meter.add_step(STEP, 0.0, 1.0)
    for end in (2.0, 3.0, 4.0):
        meter.add_step(STEP, end - 0.1, end)
    assert meter.totals.busy_seconds == 4.0


def test_pause_is_not_busy() -> None:
    meter = make_meter()
    meter.add_step(STEP, 0.0, 1.0)
    meter.pause()
    meter.add_step(STEP, 50.0, 51.0)
    assert meter.totals.busy_seconds == 2.0


def test_without_costs_nothing_is_counted() -> None:
    meter = WorkMeter(None)
    meter.add_step(STEP, 0.0, 1.0)
    assert meter.totals == WorkTotals()


def test_utilization_is_that_of_the_last_seconds() -> None:
    window = UtilizationWindow(PEAKS, "bfloat16")  # 1e12 flops and bytes a second
    assert window.observe(0.0, WorkTotals()) == Utilization()
    assert window.observe(1.0, WorkTotals(2.5e11, 5e11, 0.5)) == Utilization(0.5, 1.0)
    # twice as much time, nothing more computed
    assert window.observe(2.0, WorkTotals(2.5e11, 5e11, 1.0)) == Utilization(0.25, 0.5)
    # the steps of the first two seconds are old now
    assert window.observe(12.0, WorkTotals(3.5e11, 9e11, 2.0)) == Utilization(0.1, 0.4)
    # and now there are no recent ones
    assert window.observe(23.0, WorkTotals(3.5e11, 9e11, 2.0)) == Utilization()


@pytest.mark.parametrize(
    ("precision", "mfu"), [("bfloat16", 0.5), ("fp8", 0.25), ("float32", None)]
)
def test_products_are_compared_with_the_peak_of_their_precision(
    precision: str, mfu: float | None
) -> None:
    window = UtilizationWindow(PEAKS, precision)
    window.observe(0.0, WorkTotals())
    assert window.observe(1.0, WorkTotals(5e11, 1e11, 1.0)) == Utilization(mfu, 0.1)


def test_unknown_device_has_no_utilization() -> None:
    window = UtilizationWindow(None, "bfloat16")
    window.observe(0.0, WorkTotals())
    assert window.observe(1.0, WorkTotals(5e11, 1e11, 1.0)) == Utilization()


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H200", (989, 1979, 4800)),
        ("NVIDIA H100 80GB HBM3", (989, 1979, 3350)),
        ("A100-SXM4-80GB", (312, None, 2039)),
        ("NVIDIA A10", (125, None, 600)),
        ("NVIDIA A10G", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD EPYC", None),
        ("", None),
    ],
)
def test_peaks_are_found_by_the_exact_name(name: str, peaks: tuple[float, ...] | None) -> None:
    assert find_device_peaks(name) == peaks


@pytest.mark.parametrize("peaks", KNOWN_DEVICES.values(), ids=list(KNOWN_DEVICES))
def test_known_peaks_are_of_dense_products(peaks: DevicePeaks) -> None:
    """Figures with sparsity would be twice as high in one column."""
    assert peaks.fp8_tflops is None or peaks.fp8_tflops == pytest.approx(
        2 * peaks.bfloat16_tflops, rel=0.02
    )
    assert peaks.get_flops_per_second("bfloat16") == peaks.bfloat16_tflops * 1e12


def test_costs_are_counted_for_models_on_known_devices_only() -> None:
    engine = PacedEngine()
    assert make_step_costs(engine) is None
    engine.model_size = SIZE
    assert make_step_costs(engine) is None
    engine.compute_device = ComputeDevice("cuda:0", "NVIDIA H200")
    assert make_step_costs(engine) is not None
