"""Degradation steps are taken in order, where they can help, and taken back in the opposite
order."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster_link.messages import DecodeOrder, PrefillOrder
from baton.errors import Overloaded
from baton.types import Principal
from coordinator.core.admission.degradation import (
    ENGAGE_SECONDS,
    RELEASE_SECONDS,
    SAMPLE_PERIOD_SECONDS,
    DegradationController,
    DegradationStep,
    PressureSample,
)
from coordinator.core.admission.tenants import Tenant, TenantTable
from coordinator.core.common.effects import DegradationChanged
from coordinator.operators.degradation_view import degradation_to_pb, list_notices
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

ORDER = list(DegradationStep)


class DegradationRun:
    """A controller on a clock that the test turns."""

    def __init__(self, *cannot_help: DegradationStep) -> None:
        self.degradation = DegradationController()
        self.cannot_help = dict.fromkeys(cannot_help, "")
        self.now = 0.0
        self.changes: list[tuple[float, DegradationStep, bool]] = []

    def hold_pressure(self, pressure: float | None, seconds: float) -> None:
        """Apply a sample every PERIOD, the first one now."""
        for _ in range(round(seconds / SAMPLE_PERIOD_SECONDS)):
            change = self.degradation.apply_sample(
                PressureSample(pressure, self.cannot_help), self.now
            )
            if change is not None:
                self.changes.append((self.now, change.step, change.is_taken))
            self.now += SAMPLE_PERIOD_SECONDS


def test_each_step_has_engage_time_before_next() -> None:
    run = DegradationRun()
    run.hold_pressure(1.0, 20.0)
    assert run.changes == [
        ((number + 1) * ENGAGE_SECONDS, step, True) for number, step in enumerate(ORDER)
    ]
    assert list(run.degradation.active_steps) == ORDER


def test_steps_are_taken_back_in_reverse_order_and_slower() -> None:
    run = DegradationRun()
    run.hold_pressure(2.0, 13.0)
    run.changes.clear()
    began = run.now
    run.hold_pressure(0.0, 60.0)
    assert run.changes == [
        (began + (n + 1) * RELEASE_SECONDS, step, False) for n, step in enumerate(reversed(ORDER))
    ]
    assert not run.degradation.active_steps
    assert run.degradation.change_counts == {
        (s.value, how): 1 for s in ORDER for how in ("taken", "taken_back")
    }


def test_unhelpful_steps_are_skipped() -> None:
    run = DegradationRun(DegradationStep.SHED_LOWEST, DegradationStep.CAPPED_OUTPUT)
    run.hold_pressure(5.0, 30.0)
    assert [step for _, step, _ in run.changes] == [
        DegradationStep.SMALLER_TOKEN_BUDGET,
        DegradationStep.LOCAL_PREFILL_ONLY,
    ]
    nothing = DegradationRun(*DegradationStep)
    nothing.hold_pressure(5.0, 60.0)
    assert not nothing.changes


def test_brief_pressure_and_hysteresis_band_change_nothing() -> None:
    run = DegradationRun()
    for _ in range(20):
        run.hold_pressure(3.0, ENGAGE_SECONDS - SAMPLE_PERIOD_SECONDS)
        run.hold_pressure(0.9, SAMPLE_PERIOD_SECONDS)
    assert not run.changes
    run.hold_pressure(1.5, ENGAGE_SECONDS + SAMPLE_PERIOD_SECONDS)
    assert len(run.changes) == 1
    for _ in range(20):
        run.hold_pressure(0.7, 30.0)
        run.hold_pressure(0.1, RELEASE_SECONDS - SAMPLE_PERIOD_SECONDS)
    assert len(run.changes) == 1, "and what is taken stays"


def test_waiting_for_nodes_is_not_pressure() -> None:
    run = DegradationRun()
    run.hold_pressure(1.0, ENGAGE_SECONDS - SAMPLE_PERIOD_SECONDS)
    run.hold_pressure(None, 60.0)
    run.hold_pressure(1.0, ENGAGE_SECONDS - SAMPLE_PERIOD_SECONDS)
    assert not run.changes


def test_oscillating_load_flaps_no_faster_than_hold_times() -> None:
    run = DegradationRun()
    for _ in range(60):
        run.hold_pressure(1.2, 4.0)
        run.hold_pressure(0.2, 4.0)
    assert [taken for _, _, taken in run.changes] == [True] * len(ORDER), (
        "never taken back within RELEASE"
    )


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.none() | st.floats(0.0, 3.0), st.integers(1, 30)), max_size=30),
    st.sets(st.sampled_from(DegradationStep)),
)
def test_steps_follow_order_under_any_pressure(
    loads: list[tuple[float | None, int]], useless: set[DegradationStep]
) -> None:
    run = DegradationRun(*useless)
    for pressure, readings in loads:
        run.hold_pressure(pressure, readings * SAMPLE_PERIOD_SECONDS)
        active = list(run.degradation.active_steps)
        assert active == [step for step in ORDER if step in active], (
            "always the first ones, in order"
        )
        assert not useless & set(active)
    for (before, _, _), (after, _, taken) in pairwise(run.changes):
        assert after - before >= (ENGAGE_SECONDS if taken else RELEASE_SECONDS)


def test_sampling_is_scheduled_only_while_relevant() -> None:
    degradation = DegradationController()
    assert degradation.next_sample_at(waiting=True) is None
    degradation.apply_sample(PressureSample(0.0, {}), 5.0)
    assert degradation.next_sample_at(waiting=False) is None
    assert degradation.next_sample_at(waiting=True) == 5.0 + SAMPLE_PERIOD_SECONDS
    degradation.apply_sample(PressureSample(2.0, {}), 6.0)
    degradation.apply_sample(PressureSample(2.0, {}), 6.0 + ENGAGE_SECONDS)
    assert degradation.next_sample_at(waiting=False) == 6.0 + ENGAGE_SECONDS + SAMPLE_PERIOD_SECONDS


# the whole brain

TWO = TenantTable(
    classes=("premium", "batch"),
    by_name={
        "a": Tenant("a", "premium", tokens_per_second=1e4, token_burst=1e4),
        "b": Tenant("b", "batch"),
    },
    max_wait_seconds={"premium": 1.0},
)
PREMIUM, BATCH = Principal("a", "premium", 0), Principal("b", "batch", 1)


def make_crowded_cluster(mode: str = "auto", **settings: object) -> BrainHarness:
    """Return a cluster whose decode node has no slot left, and a waiting request of the first
    class."""
    world = BrainHarness(mode, prefill_share=0.5, **settings)  # type: ignore[arg-type]
    node = world.join_node("d", DECODE)
    world.brain.reload_tenants(TWO, world.now)
    for _ in range(4):
        world.submit(max_tokens=200, standing=PREMIUM)
        world.report_token(node, world.last_attempt_key(node), 0)
    world.submit(standing=PREMIUM)
    return world


def changes(world: BrainHarness) -> list[tuple[str, bool]]:
    return [
        (effect.step, effect.is_taken)
        for effect in world.effects
        if isinstance(effect, DegradationChanged)
    ]


def wait(world: BrainHarness, seconds: float) -> None:
    """Advance the clock as the shell does: call `tick` whenever the brain asks for it."""
    until = world.now + seconds
    while world.now < until:
        due = world.brain.next_tick_at()
        world.advance(min(until, due if due is not None else until) - world.now)


def test_long_waits_degrade_step_by_step() -> None:
    world = make_crowded_cluster(degraded_max_tokens=10)
    node = next(iter(world.brain.node_registry.nodes))
    wait(world, 1.0 + 3 * (ENGAGE_SECONDS + 2 * SAMPLE_PERIOD_SECONDS))
    assert changes(world) == [
        ("shed_lowest", True),
        ("smaller_token_budget", True),
        ("capped_output", True),
    ]
    with pytest.raises(Overloaded, match="'batch', the lowest") as refused:
        world.submit(standing=BATCH)
    assert refused.value.retry_after
    assert [sentence.split(":")[0] for sentence in list_notices(world.brain)] == [
        "degraded (shed_lowest)",
        "degraded (smaller_token_budget)",
        "degraded (capped_output)",
        "no prefill node serves",
    ]
    told = {one.step: one for one in degradation_to_pb(world.brain.degradation, world.now)}
    assert list(told) == [step.value for step in DegradationStep]
    assert told["shed_lowest"].seconds >= ENGAGE_SECONDS
    assert told["local_prefill_only"].cannot_help == "hand-offs do not fail"
    world.stop(world.last_attempt_key(node).request_id)
    (bucket,) = (
        account.token_bucket
        for account in world.brain.parts.placement.admission._accounts.values()
        if account.token_bucket
    )
    assert bucket.rate == 5e3
    assert world.messages_to(node, DecodeOrder)[-1].work.request.sampling.max_tokens == 4, (
        "it was let in before"
    )
    world.report_token(node, world.last_attempt_key(node), 0)
    capped = world.submit(max_tokens=100, min_tokens=20, standing=PREMIUM)
    world.stop(next(iter(world.brain.list_active_requests())))
    sampling = next(
        o.work.request for o in world.messages_to(node, DecodeOrder) if o.work.request.id == capped
    ).sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (10, 10)
    for _ in range(3):
        wait(world, RELEASE_SECONDS + 2 * SAMPLE_PERIOD_SECONDS)
    assert changes(world)[3:] == [
        ("capped_output", False),
        ("smaller_token_budget", False),
        ("shed_lowest", False),
    ]
    (bucket,) = (
        account.token_bucket
        for account in world.brain.parts.placement.admission._accounts.values()
        if account.token_bucket
    )
    assert bucket.rate == 1e4
    world.submit(standing=BATCH)
    assert list_notices(world.brain) == [
        "no prefill node serves: decode nodes compute every prompt"
    ]


def test_single_class_without_options_does_not_degrade() -> None:
    world = BrainHarness("disaggregated")
    world.join_node("p", PREFILL)
    node = world.join_node("d", DECODE)
    for _ in range(4):
        world.submit(max_tokens=200)
        world.report_token(node, world.last_attempt_key(node), 0)
    world.submit()
    wait(world, 40.0)
    assert changes(world) == []
    assert world.brain.degradation.last_sample.pressure == pytest.approx(8.0, rel=0.1), (
        "5 s are normal"
    )
    assert set(world.brain.degradation.last_sample.unhelpful_steps) == set(DegradationStep)


def test_flooding_tenant_or_waiting_lowest_class_sheds_nothing() -> None:
    world = make_crowded_cluster()
    premium = world.brain.list_active_requests()[-1]
    world.stop(premium)
    for standing in (BATCH, Principal("c", "batch", 1)):
        world.submit(standing=standing)
    wait(world, 8.0)
    assert (
        world.brain.degradation.last_sample.unhelpful_steps[DegradationStep.SHED_LOWEST]
        == "no other class waits too long"
    )
    assert world.brain.degradation.last_sample.pressure == pytest.approx(8.0 / 5.0, rel=0.1)
    world.submit(standing=Principal("d", "batch", 1))
    wait(world, 2 * SAMPLE_PERIOD_SECONDS)
    assert world.brain.degradation.last_sample.pressure == pytest.approx(0.2, rel=0.6), (
        "that of who waits least"
    )


def test_outage_is_not_overload() -> None:
    world = make_crowded_cluster(degraded_max_tokens=10)
    world.lose_node(next(iter(world.brain.node_registry.nodes)))
    wait(world, 30.0)
    assert changes(world) == []


def test_failing_handoffs_switch_to_local_prefill_and_back() -> None:
    world = BrainHarness("disaggregated", prefill_share=0.5)
    prefill, node = world.join_node("p", PREFILL), world.join_node("d", DECODE)
    world.brain.counters.handoffs["checksum_mismatch", "shm"] += 16
    for _ in range(4):
        request = world.submit(max_tokens=200)
        world.report_token(node, world.last_attempt_key(node), 0)
    world.submit()
    wait(world, 6.0 + ENGAGE_SECONDS)
    assert changes(world) == [("local_prefill_only", True)]
    world.stop(request)
    submit = world.messages_to(node, DecodeOrder)[-1]
    assert (submit.kv_writer, submit.prefill_step_share) == (None, 0.5)
    assert world.brain.counters.placements["local", "degraded"] == 1
    assert world.brain.is_local_prefill_only
    wait(world, RELEASE_SECONDS + 2 * SAMPLE_PERIOD_SECONDS)
    assert changes(world)[1:] == [("local_prefill_only", False)]
    for active in world.brain.list_active_requests():
        world.stop(active)
    before = len(world.messages_to(prefill, PrefillOrder))
    world.submit()
    assert len(world.messages_to(prefill, PrefillOrder)) == before + 1
