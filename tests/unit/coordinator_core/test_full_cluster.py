"""What is placed, and what is looked at, while every decode node serves as many as it can."""

from collections.abc import Sequence

from coordinator.core import messages as m
from coordinator.core.cost_model import CostModel
from coordinator.core.placement import Choice, Demand, NodeView, Outlook
from coordinator.core.simple_policies import LeastLoaded
from tests.unit.coordinator_core.world import DECODE, PREFILL, World


class Counted(LeastLoaded):
    asked = 0

    def choose(self, demand: Demand, nodes: Sequence[NodeView], outlook: Outlook) -> Choice | None:
        self.asked += 1
        return super().choose(demand, nodes, outlook)


def test_nobody_is_asked_where_those_who_wait_could_go() -> None:
    """Each heartbeat and each end of a leg brings another look at the line."""
    policy = Counted()
    world = World(placement=policy)
    world.join("p0", PREFILL)
    decode = world.join("d0", DECODE, max_num_seqs=1)
    first = world.submit()
    waiting = [world.submit() for _ in range(3)]
    assert policy.asked == 1
    for _ in range(5):
        world.beat(decode)
    assert policy.asked == 1
    world.cancel(first)
    assert policy.asked == 2
    assert len(world.sent(decode, m.Submit)) == 2
    assert world.key(decode).request == waiting[0]


def test_one_token_alone_needs_no_place_there() -> None:
    world = World()
    prefill = world.join("p0", PREFILL)
    world.join("d0", DECODE, max_num_seqs=1)
    world.submit()
    world.submit()
    alone = world.submit(max_tokens=1)
    assert world.key(prefill).request == alone


def test_whether_a_prompt_can_be_computed_in_time_is_mostly_one_question() -> None:
    costs = CostModel()
    assert costs.can_prefill_within(100, 0, 1e-6), "nobody has reported: who knows"
    assert not costs.can_prefill_within(100, 0, 0.0)
    for number, seconds in enumerate((0.1, 0.2, 0.4)):
        for _ in range(50):
            costs.prefill_took(f"p{number}", 100, 0, seconds)  # type: ignore[arg-type]
    least = costs.least_prefill(100, 0)
    assert costs.can_prefill_within(100, 0, least * 1.01)
    assert not costs.can_prefill_within(100, 0, least)
