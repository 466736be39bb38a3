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


def test_further_choices_that_find_the_holder_full_bring_their_prompt_to_another_node_once() -> None:
    world = World(max_queue=16)
    prefill = world.join("p0", PREFILL, max_num_seqs=16, max_batched_tokens=1024)
    full = world.join("d0", DECODE, max_num_seqs=3)
    first = world.arrival()
    world.submit_all(first, *(world.arrival(after=first.request.id, choice=number) for number in range(1, 8)))
    roomy = world.join("d1", DECODE, max_num_seqs=8)
    world.reserve(full, world.key(full), prefill)
    world.token(full, world.key(full), 0)
    assert len(world.sent(full, m.Submit)) == 3
    assert [order.writer is not None for order in world.sent(roomy, m.Submit)] == [True], "the others wait for it"
    world.reserve(roomy, world.key(roomy), prefill)
    world.token(roomy, world.key(roomy), 0)
    assert [order.writer is not None for order in world.sent(roomy, m.Submit)] == [True, False, False, False, False]
    assert len(world.sent(prefill, m.Prefill)) == 2, "one for each cache"
    assert not world.brain._table._followers._of
