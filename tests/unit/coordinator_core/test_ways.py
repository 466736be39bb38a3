"""Who computes a prompt in mode auto: whoever ends sooner, by predictions that the tests fix."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ChecksumMismatch
from baton.limits import LOCAL_PREFILL_BURST
from baton.types import Incarnation, NodeName
from coordinator.core import messages as m
from coordinator.core.cost_model import CostModel
from coordinator.core.loads import Loads
from coordinator.core.placement import Demand, NodeView, Outlook
from coordinator.core.policies import POLICIES
from coordinator.core.prediction import Decision, Way, Why
from coordinator.core.prefix_aware import PrefixAware
from coordinator.core.ways import Ways, finish
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

NOW = 1000.0
SHARE = 0.5
P = NodeView(Incarnation("p"), PREFILL, 64, 512, 0, 0, 0, 4096, None, 0, name=NodeName("p"))
D = NodeView(Incarnation("d"), DECODE, 64, 512, 0, 0, 0, 4096, None, 0, name=NodeName("d"))
DEMAND = Demand(tokens=1024, blocks=65, prefill=True, decode=True, output=100.0)
BUSY = replace(D, attempts=4, running=4)


def costs(link: float = 0.005) -> CostModel:
    """0.1 ms a token on every node, and `link` seconds for a hand-off of any size."""
    made = CostModel()
    for tokens in (64, 512, 2048, 4096) * 40:
        made.prefill_took(P.name, tokens, 0, 1e-4 * tokens)
        made.prefill_took(D.name, tokens, 0, 1e-4 * tokens)
        made.transfer_took(P.name, D.name, tokens * 1024, link)
    return made


COSTS = costs()


def decide(demand: Demand, *nodes: NodeView, model: CostModel = COSTS) -> Decision | None:
    outlook = Outlook(NOW, model, 1.0, token_bytes=1024, share=SHARE)
    return Ways(PrefixAware()).decide(demand, nodes, outlook, Why.MODE, either=True)


def way(demand: Demand, *nodes: NodeView, model: CostModel = COSTS) -> Way | None:
    decision = decide(demand, *nodes, model=model)
    return decision.way if decision else None


def test_an_idle_decode_node_saves_the_hand_off() -> None:
    assert way(DEMAND, P, D, model=costs(0.02)) is Way.LOCAL
    assert way(replace(DEMAND, tokens=16, blocks=2), P, D) is Way.LOCAL


def test_beside_residents_long_prompts_are_handed_over() -> None:
    assert way(DEMAND, P, BUSY) is Way.HAND_OFF
    short = replace(DEMAND, tokens=16, blocks=2)
    assert way(short, P, BUSY, model=costs(0.02)) is Way.LOCAL, "a step more than alone, and the link takes 20 ms"


def test_a_queue_at_prefill_sends_prompts_to_decode() -> None:
    """0.1 s of computing takes more than 0.25 s beside residents."""
    queued = replace(P, queued_seconds=0.15, head_seconds=0.15, head_since=NOW, attempts=1, computing=1)
    assert way(DEMAND, queued, BUSY) is Way.HAND_OFF
    assert way(DEMAND, replace(queued, queued_seconds=0.5, head_seconds=0.5), BUSY) is Way.LOCAL


def test_both_predictions_are_kept() -> None:
    decision = decide(DEMAND, P, BUSY)
    assert decision is not None
    assert decision.other is not None
    assert decision.prediction.prefill == pytest.approx(0.1024, rel=0.05)
    step = COSTS.node(D.name).step(4, 0)
    at_once = LOCAL_PREFILL_BURST * SHARE * step
    assert decision.other.prefill == pytest.approx(at_once + step + 3 * (0.1024 - at_once), rel=0.05)
    assert decision.why is Why.SOONER
    assert finish(decision.prediction) < finish(decision.other)


def test_equal_predictions_leave_residents_alone() -> None:
    assert way(DEMAND, P, D, model=costs(0.0004)) is Way.HAND_OFF


def test_where_prefill_has_no_room_yet_the_sooner_way_may_be_to_wait() -> None:
    full = replace(
        P, computing=2, window_tokens=1024, attempts=2, queued_seconds=0.1, head_seconds=0.05, head_since=NOW
    )
    assert full.takes_prefill(DEMAND) is False
    assert way(DEMAND, full, BUSY) is None
    assert way(DEMAND, full, D) is Way.LOCAL
    assert way(DEMAND, replace(full, queued_seconds=1.0), BUSY) is Way.LOCAL
    closed = replace(full, closed_from=1)
    assert way(DEMAND, closed, BUSY) is Way.LOCAL, "nobody knows when it will have room"


def test_where_decode_has_no_room_everybody_waits() -> None:
    assert way(DEMAND, P, replace(D, room=10)) is None


def test_who_holds_the_context_needs_nobody() -> None:
    decision = decide(replace(DEMAND, holder=D.incarnation), P, D)
    assert decision is not None
    assert (decision.way, decision.why, decision.choice.prefill) == (Way.LOCAL, Why.HELD, None)


def test_after_a_failure_the_way_with_fewer_of_its_nodes() -> None:
    failed = frozenset({P.incarnation, BUSY.incarnation})
    decision = decide(replace(DEMAND, avoid=failed), P, BUSY)
    assert decision is not None
    assert (decision.way, decision.why) == (Way.LOCAL, Why.FAILED)
    other = replace(D, incarnation=Incarnation("d1"), name=NodeName("d1"), attempts=4, running=4)
    spare = replace(P, incarnation=Incarnation("p1"), name=NodeName("p1"))
    assert way(replace(DEMAND, avoid=failed), P, spare, BUSY, other) is Way.HAND_OFF


def test_pairs_that_are_kept_apart_do_not_hand_over_and_nobody_waits_for_them() -> None:
    outlook = Outlook(NOW, COSTS, 1.0, token_bytes=1024, share=SHARE)
    apart = frozenset({(P.incarnation, BUSY.incarnation)})
    decision = Ways(PrefixAware()).decide(DEMAND, [P, BUSY], outlook, Why.MODE, either=True, apart=apart)
    assert decision is not None
    assert decision.way is Way.LOCAL


views = st.builds(
    NodeView,
    incarnation=st.integers(0, 10**6).map(lambda number: Incarnation(str(number))),
    role=st.sampled_from([PREFILL, DECODE]),
    max_num_seqs=st.integers(1, 8),
    max_batched_tokens=st.just(64),
    attempts=st.integers(0, 9),
    computing=st.integers(0, 3),
    uncomputed_tokens=st.integers(0, 300),
    room=st.integers(-5, 40),
    closed_from=st.none() | st.integers(1, 40),
    last_placed=st.integers(0, 99),
    running=st.integers(0, 3),
    queued_seconds=st.floats(0, 2),
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100)
@given(st.lists(views, max_size=6, unique_by=lambda view: view.incarnation), st.integers(1, 600), st.booleans())
def test_either_way_only_nodes_that_can_take_it_and_never_stuck(
    name: str, nodes: list[NodeView], tokens: int, decode: bool
) -> None:
    demand = Demand(tokens, tokens // 16 + 1, prefill=True, decode=decode, output=4.0)
    outlook = Outlook(NOW, COSTS, 1.0, token_bytes=1024, share=SHARE)
    decision = Ways(POLICIES[name]()).decide(demand, nodes, outlook, Why.MODE, either=True)
    by_id = {node.incarnation: node for node in nodes}
    if decision is None:
        able = [node.role for node in nodes if node.takes(demand)]
        assert PREFILL not in able or (decode and DECODE not in able), "a hand-off could have been made at once"
        waited_for = any(node.role is PREFILL and not node.is_closed_to(demand) for node in nodes)
        assert DECODE not in able or waited_for
        return
    choice = decision.choice
    for chosen in filter(None, (choice.prefill, choice.decode)):
        assert by_id[chosen].takes(demand)
    assert (decision.way is Way.HAND_OFF) == (choice.prefill is not None)
    assert choice.decode is not None or not decode


# the whole brain


def test_without_prefill_nodes_everything_is_computed_on_decode_and_with_them_it_is_weighed() -> None:
    world = World("auto", placement=PrefixAware(), prefill_share=0.25)
    decode = world.join("d", DECODE)
    world.submit()
    (submit,) = world.sent(decode, m.Submit)
    assert (submit.writer, submit.prefill_share) == (None, 0.25)
    assert world.brain.counters.placements == {("local", "no_prefill_node"): 1}
    told = world.brain.explain(world.key(decode).request, world.now)
    assert (told.attempts[0].way, told.attempts[0].why) == ("local", "no_prefill_node")
    assert not told.attempts[0].HasField("other_way")
    prefill = world.join("p", PREFILL)
    world.beat(prefill)
    request = world.submit(prompt=100)
    told = world.brain.explain(request, world.now)
    assert told.attempts[0].HasField("other_way")
    assert told.attempts[0].why == "sooner"
    world.gone(prefill)
    world.submit()
    assert world.brain.counters.placements["local", "no_prefill_node"] >= 2


def test_fixed_modes_have_no_other_way_and_no_bound() -> None:
    world = World("disaggregated", prefill_share=0.25)
    world.join("p", PREFILL)
    decode = world.join("d", DECODE)
    request = world.submit()
    assert world.sent(decode, m.Submit)[0].prefill_share == 0.0
    told = world.brain.explain(request, world.now).attempts[0]
    assert (told.way, told.why, told.HasField("other_way")) == ("hand_off", "mode", False)


def test_a_hand_off_that_failed_is_not_tried_again_at_the_same_nodes() -> None:
    world = World("auto", placement=PrefixAware(), prefill_share=0.5, max_attempts=4)
    prefill, decode = world.join("p", PREFILL), world.join("d", DECODE)
    world.submit(prompt=16, max_tokens=40)
    first = world.key(decode)
    world.token(decode, first, 0)  # a resident: prompts beside it take longer
    request = world.submit(prompt=200)
    assert world.brain.explain(request, world.now).attempts[0].way == "hand_off"
    key = world.key(decode)
    world.reserve(decode, key, prefill)
    world.fail(decode, key, ChecksumMismatch("a bit"))
    told = world.brain.explain(request, world.now).attempts[1]
    assert (told.way, told.why) == ("local", "failed")


def test_books_know_who_runs() -> None:
    world = World("auto")
    node = world.join("d", DECODE)
    world.submit()
    loads: Loads = world.brain._table.loads
    view = loads.view(world.brain.registry.nodes[node])
    assert (view.attempts, view.running) == (1, 0)
    world.token(node, world.key(node), 0)
    assert loads.view(world.brain.registry.nodes[node]).running == 1
