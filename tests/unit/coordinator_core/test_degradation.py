"""Steps are taken in order, one at a time, only where they can help, and taken back in the opposite order."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Overloaded
from baton.types import Standing
from coordinator.core import messages as m
from coordinator.core.degradation import ENGAGE, PERIOD, RELEASE, Degradation, Reading, Step
from coordinator.core.tenants import Tenant, Tenants
from coordinator.degradation_view import degradation_to_pb, notices
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

ORDER = list(Step)


class Run:
    """A controller on a clock that the test turns."""

    def __init__(self, *cannot_help: Step) -> None:
        self.degradation = Degradation()
        self.cannot_help = dict.fromkeys(cannot_help, "")
        self.now = 0.0
        self.changes: list[tuple[float, Step, bool]] = []

    def hold(self, pressure: float | None, seconds: float) -> None:
        """A reading every PERIOD, the first one now."""
        for _ in range(round(seconds / PERIOD)):
            change = self.degradation.read(Reading(pressure, self.cannot_help), self.now)
            if change is not None:
                self.changes.append((self.now, change.step, change.taken))
            self.now += PERIOD


def test_each_step_has_its_time_to_act_before_the_next_one() -> None:
    run = Run()
    run.hold(1.0, 20.0)
    assert run.changes == [((number + 1) * ENGAGE, step, True) for number, step in enumerate(ORDER)]
    assert list(run.degradation.active) == ORDER


def test_they_are_taken_back_in_the_opposite_order_and_slower() -> None:
    run = Run()
    run.hold(2.0, 13.0)
    run.changes.clear()
    began = run.now
    run.hold(0.0, 60.0)
    assert run.changes == [(began + (n + 1) * RELEASE, step, False) for n, step in enumerate(reversed(ORDER))]
    assert not run.degradation.active
    assert run.degradation.counts == {(s.value, how): 1 for s in ORDER for how in ("taken", "taken_back")}


def test_what_cannot_help_is_passed_over() -> None:
    run = Run(Step.SHED_LOWEST, Step.CAPPED_OUTPUT)
    run.hold(5.0, 30.0)
    assert [step for _, step, _ in run.changes] == [Step.SMALLER_TOKEN_BUDGET, Step.LOCAL_PREFILL_ONLY]
    nothing = Run(*Step)
    nothing.hold(5.0, 60.0)
    assert not nothing.changes


def test_a_moment_is_no_reason_and_the_band_between_changes_nothing() -> None:
    run = Run()
    for _ in range(20):
        run.hold(3.0, ENGAGE - PERIOD)
        run.hold(0.9, PERIOD)
    assert not run.changes
    run.hold(1.5, ENGAGE + PERIOD)
    assert len(run.changes) == 1
    for _ in range(20):
        run.hold(0.7, 30.0)
        run.hold(0.1, RELEASE - PERIOD)
    assert len(run.changes) == 1, "and what is taken stays"


def test_waiting_for_nodes_is_no_pressure() -> None:
    run = Run()
    run.hold(1.0, ENGAGE - PERIOD)
    run.hold(None, 60.0)
    run.hold(1.0, ENGAGE - PERIOD)
    assert not run.changes


def test_a_load_that_swings_faster_than_the_times_flaps_at_most_as_slowly_as_they_allow() -> None:
    run = Run()
    for _ in range(60):
        run.hold(1.2, 4.0)
        run.hold(0.2, 4.0)
    assert [taken for _, _, taken in run.changes] == [True] * len(ORDER), "never taken back within RELEASE"


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.none() | st.floats(0.0, 3.0), st.integers(1, 30)), max_size=30),
    st.sets(st.sampled_from(Step)),
)
def test_whatever_happens(loads: list[tuple[float | None, int]], useless: set[Step]) -> None:
    run = Run(*useless)
    for pressure, readings in loads:
        run.hold(pressure, readings * PERIOD)
        active = list(run.degradation.active)
        assert active == [step for step in ORDER if step in active], "always the first ones, in order"
        assert not useless & set(active)
    for (before, _, _), (after, _, taken) in pairwise(run.changes):
        assert after - before >= (ENGAGE if taken else RELEASE)


def test_it_asks_to_be_read_only_while_it_matters() -> None:
    degradation = Degradation()
    assert degradation.next(waiting=True) is None
    degradation.read(Reading(0.0, {}), 5.0)
    assert degradation.next(waiting=False) is None
    assert degradation.next(waiting=True) == 5.0 + PERIOD
    degradation.read(Reading(2.0, {}), 6.0)
    degradation.read(Reading(2.0, {}), 6.0 + ENGAGE)
    assert degradation.next(waiting=False) == 6.0 + ENGAGE + PERIOD


# the whole brain

TWO = Tenants(
    classes=("premium", "batch"),
    tenants={"a": Tenant("a", "premium", tokens_per_second=1e4, token_burst=1e4), "b": Tenant("b", "batch")},
    max_wait={"premium": 1.0},
)
PREMIUM, BATCH = Standing("a", "premium", 0), Standing("b", "batch", 1)


def crowded(mode: str = "auto", **settings: object) -> World:
    """A decode node with all of its places taken, and a request of the first class that waits for one."""
    world = World(mode, prefill_share=0.5, **settings)  # type: ignore[arg-type]
    node = world.join("d", DECODE)
    world.brain.reload_tenants(TWO, world.now)
    for _ in range(4):
        world.submit(max_tokens=200, standing=PREMIUM)
        world.token(node, world.key(node), 0)
    world.submit(standing=PREMIUM)
    return world


def changes(world: World) -> list[tuple[str, bool]]:
    return [(effect.step, effect.taken) for effect in world.effects if isinstance(effect, m.Degraded)]


def wait(world: World, seconds: float) -> None:
    """As the shell does: at each moment that the brain names."""
    until = world.now + seconds
    while world.now < until:
        due = world.brain.next_due()
        world.advance(min(until, due if due is not None else until) - world.now)


def test_who_waits_too_long_takes_what_the_others_give_up() -> None:
    world = crowded(degraded_max_tokens=10)
    node = next(iter(world.brain.registry.nodes))
    wait(world, 1.0 + 3 * (ENGAGE + 2 * PERIOD))
    assert changes(world) == [("shed_lowest", True), ("smaller_token_budget", True), ("capped_output", True)]
    with pytest.raises(Overloaded, match="'batch', the lowest") as refused:
        world.submit(standing=BATCH)
    assert refused.value.retry_after
    assert [sentence.split(":")[0] for sentence in notices(world.brain)] == [
        "degraded (shed_lowest)",
        "degraded (smaller_token_budget)",
        "degraded (capped_output)",
        "no prefill node serves",
    ]
    told = {one.step: one for one in degradation_to_pb(world.brain.degradation, world.now)}
    assert list(told) == [step.value for step in Step]
    assert told["shed_lowest"].seconds >= ENGAGE
    assert told["local_prefill_only"].cannot_help == "hand-offs do not fail"
    world.stop(world.key(node).request)
    (bucket,) = (account.tokens for account in world.brain._table.admission._accounts.values() if account.tokens)
    assert bucket.rate == 5e3
    assert world.sent(node, m.Submit)[-1].work.request.sampling.max_tokens == 4, "it was let in before"
    world.token(node, world.key(node), 0)
    capped = world.submit(max_tokens=100, min_tokens=20, standing=PREMIUM)
    world.stop(next(iter(world.brain.active())))
    sampling = next(o.work.request for o in world.sent(node, m.Submit) if o.work.request.id == capped).sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (10, 10)
    for _ in range(3):
        wait(world, RELEASE + 2 * PERIOD)
    assert changes(world)[3:] == [("capped_output", False), ("smaller_token_budget", False), ("shed_lowest", False)]
    (bucket,) = (account.tokens for account in world.brain._table.admission._accounts.values() if account.tokens)
    assert bucket.rate == 1e4
    world.submit(standing=BATCH)
    assert notices(world.brain) == ["no prefill node serves: decode nodes compute every prompt"]


def test_one_class_without_local_prompts_or_a_cap_gives_up_nothing() -> None:
    world = World("disaggregated")
    world.join("p", PREFILL)
    node = world.join("d", DECODE)
    for _ in range(4):
        world.submit(max_tokens=200)
        world.token(node, world.key(node), 0)
    world.submit()
    wait(world, 40.0)
    assert changes(world) == []
    assert world.brain.degradation.last.pressure == pytest.approx(8.0, rel=0.1), "5 s are normal"
    assert set(world.brain.degradation.last.cannot_help) == set(Step)


def test_a_tenant_that_floods_its_own_line_and_a_lowest_class_that_waits_shed_nobody() -> None:
    world = crowded()
    premium = world.brain.active()[-1]
    world.stop(premium)
    for standing in (BATCH, Standing("c", "batch", 1)):
        world.submit(standing=standing)
    wait(world, 8.0)
    assert world.brain.degradation.last.cannot_help[Step.SHED_LOWEST] == "no other class waits too long"
    assert world.brain.degradation.last.pressure == pytest.approx(8.0 / 5.0, rel=0.1)
    world.submit(standing=Standing("d", "batch", 1))
    wait(world, 2 * PERIOD)
    assert world.brain.degradation.last.pressure == pytest.approx(0.2, rel=0.6), "that of who waits least"


def test_an_outage_is_no_overload() -> None:
    world = crowded(degraded_max_tokens=10)
    world.gone(next(iter(world.brain.registry.nodes)))
    wait(world, 30.0)
    assert changes(world) == []


def test_failing_hand_offs_are_given_up_in_the_end_and_tried_again_afterwards() -> None:
    world = World("disaggregated", prefill_share=0.5)
    prefill, node = world.join("p", PREFILL), world.join("d", DECODE)
    world.brain.counters.handoffs["checksum_mismatch", "shm"] += 16
    for _ in range(4):
        request = world.submit(max_tokens=200)
        world.token(node, world.key(node), 0)
    world.submit()
    wait(world, 6.0 + ENGAGE)
    assert changes(world) == [("local_prefill_only", True)]
    world.stop(request)
    submit = world.sent(node, m.Submit)[-1]
    assert (submit.writer, submit.prefill_share) == (None, 0.5)
    assert world.brain.counters.placements["local", "degraded"] == 1
    assert world.brain.local_prefill_only
    wait(world, RELEASE + 2 * PERIOD)
    assert changes(world)[1:] == [("local_prefill_only", False)]
    for active in world.brain.active():
        world.stop(active)
    before = len(world.sent(prefill, m.Prefill))
    world.submit()
    assert len(world.sent(prefill, m.Prefill)) == before + 1
