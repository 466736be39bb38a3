"""Who computes a prompt in mode auto: whoever ends sooner, by predictions that the tests fix."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster_link.messages import DecodeOrder
from baton.errors import ChecksumMismatch
from baton.limits import LOCAL_PREFILL_BURST_STEPS
from baton.types import Incarnation, NodeName
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.placement.disaggregation import DisaggregationPolicy, completion_seconds
from coordinator.core.placement.interface import (
    PlacementContext,
    PlacementDecision,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.placement.node_loads import NodeLoads, NodeView, PlacementDemand
from coordinator.core.placement.policies import POLICIES, PrefixAwarePolicy
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

NOW = 1000.0
SHARE = 0.5
P = NodeView(Incarnation("p"), PREFILL, 64, 512, 0, 0, 0, 4096, None, 0, name=NodeName("p"))
D = NodeView(Incarnation("d"), DECODE, 64, 512, 0, 0, 0, 4096, None, 0, name=NodeName("d"))
DEMAND = PlacementDemand(
    context_tokens=1024,
    blocks=65,
    needs_prefill=True,
    needs_decode=True,
    expected_output_tokens=100.0,
)
BUSY = replace(D, attempts=4, running_attempts=4)


def costs(link: float = 0.005) -> CostModel:
    """0.1 ms a token on every node, and `link` seconds for a hand-off of any size."""
    made = CostModel()
    for tokens in (64, 512, 2048, 4096) * 40:
        made.record_prefill(P.name, tokens, 0, 1e-4 * tokens)
        made.record_prefill(D.name, tokens, 0, 1e-4 * tokens)
        made.record_transfer(P.name, D.name, tokens * 1024, link)
    return made


COSTS = costs()


def decide(
    demand: PlacementDemand, *nodes: NodeView, model: CostModel = COSTS
) -> PlacementDecision | None:
    outlook = PlacementContext(NOW, model, 1.0, token_bytes=1024, local_prefill_share=SHARE)
    return DisaggregationPolicy(PrefixAwarePolicy()).decide_placement(demand, nodes, outlook)


def choose_site(
    demand: PlacementDemand, *nodes: NodeView, model: CostModel = COSTS
) -> PrefillSite | None:
    decision = decide(demand, *nodes, model=model)
    return decision.prefill_site if decision else None


def test_idle_decode_node_prefills_locally() -> None:
    assert choose_site(DEMAND, P, D, model=costs(0.02)) is PrefillSite.LOCAL
    assert choose_site(replace(DEMAND, context_tokens=16, blocks=2), P, D) is PrefillSite.LOCAL


def test_long_prompts_are_handed_off_from_busy_decode_node() -> None:
    assert choose_site(DEMAND, P, BUSY) is PrefillSite.HAND_OFF
    short = replace(DEMAND, context_tokens=16, blocks=2)
    assert choose_site(short, P, BUSY, model=costs(0.02)) is PrefillSite.LOCAL, (
        "a step more than alone, and the link takes 20 ms"
    )


def test_prefill_queue_sends_prompts_to_decode() -> None:
    """0.1 s of computing takes more than 0.25 s beside residents."""
    queued = replace(
        P,
        queued_seconds=0.15,
        head_prefill_seconds=0.15,
        head_since=NOW,
        attempts=1,
        pending_prefills=1,
    )
    assert choose_site(DEMAND, queued, BUSY) is PrefillSite.HAND_OFF
    assert (
        choose_site(DEMAND, replace(queued, queued_seconds=0.5, head_prefill_seconds=0.5), BUSY)
        is PrefillSite.LOCAL
    )


def test_rejected_prediction_is_recorded() -> None:
    decision = decide(DEMAND, P, BUSY)
    assert decision is not None
    assert decision.rejected_prediction is not None
    assert decision.prediction.prefill_seconds == pytest.approx(0.1024, rel=0.05)
    step = COSTS.get_node_costs(D.name).step_seconds(4, 0)
    at_once = LOCAL_PREFILL_BURST_STEPS * SHARE * step
    assert decision.rejected_prediction.prefill_seconds == pytest.approx(
        at_once + step + 3 * (0.1024 - at_once), rel=0.05
    )
    assert decision.reason is PlacementReason.SOONER
    assert completion_seconds(decision.prediction) < completion_seconds(
        decision.rejected_prediction
    )


def test_equal_predictions_choose_hand_off() -> None:
    assert choose_site(DEMAND, P, D, model=costs(0.0004)) is PrefillSite.HAND_OFF


def test_request_waits_for_full_prefill_node_if_that_is_faster() -> None:
    full = replace(
        P,
        pending_prefills=2,
        window_tokens=1024,
        attempts=2,
        queued_seconds=0.1,
        head_prefill_seconds=0.05,
        head_since=NOW,
    )
    assert full.can_accept_prefill(DEMAND) is False
    assert choose_site(DEMAND, full, BUSY) is None
    assert choose_site(DEMAND, full, D) is PrefillSite.LOCAL
    assert choose_site(DEMAND, replace(full, queued_seconds=1.0), BUSY) is PrefillSite.LOCAL
    closed = replace(full, refused_from_blocks=1)
    assert choose_site(DEMAND, closed, BUSY) is PrefillSite.LOCAL, (
        "nobody knows when it will have room"
    )


def test_full_decode_node_makes_request_wait() -> None:
    assert choose_site(DEMAND, P, replace(D, free_blocks=10)) is None


def test_prefix_holder_needs_no_prefill_node() -> None:
    decision = decide(replace(DEMAND, prefix_holder=D.incarnation), P, D)
    assert decision is not None
    assert (decision.prefill_site, decision.reason, decision.choice.prefill) == (
        PrefillSite.LOCAL,
        PlacementReason.PREFIX_CACHED,
        None,
    )


def test_after_failure_site_with_fewer_failed_nodes_is_chosen() -> None:
    failed = frozenset({P.incarnation, BUSY.incarnation})
    decision = decide(replace(DEMAND, avoided_nodes=failed), P, BUSY)
    assert decision is not None
    assert (decision.prefill_site, decision.reason) == (
        PrefillSite.LOCAL,
        PlacementReason.FAILED_BEFORE,
    )
    other = replace(
        D, incarnation=Incarnation("d1"), name=NodeName("d1"), attempts=4, running_attempts=4
    )
    spare = replace(P, incarnation=Incarnation("p1"), name=NodeName("p1"))
    assert (
        choose_site(replace(DEMAND, avoided_nodes=failed), P, spare, BUSY, other)
        is PrefillSite.HAND_OFF
    )


def test_blocked_pairs_are_neither_used_nor_waited_for() -> None:
    outlook = PlacementContext(NOW, COSTS, 1.0, token_bytes=1024, local_prefill_share=SHARE)
    apart = frozenset({(P.incarnation, BUSY.incarnation)})
    decision = DisaggregationPolicy(PrefixAwarePolicy()).decide_placement(
        DEMAND, [P, BUSY], outlook, blocked_pairs=apart
    )
    assert decision is not None
    assert decision.prefill_site is PrefillSite.LOCAL


views = st.builds(
    NodeView,
    incarnation=st.integers(0, 10**6).map(lambda number: Incarnation(str(number))),
    role=st.sampled_from([PREFILL, DECODE]),
    max_num_seqs=st.integers(1, 8),
    max_batched_tokens=st.just(64),
    attempts=st.integers(0, 9),
    pending_prefills=st.integers(0, 3),
    uncomputed_tokens=st.integers(0, 300),
    free_blocks=st.integers(-5, 40),
    refused_from_blocks=st.none() | st.integers(1, 40),
    last_placed_serial=st.integers(0, 99),
    running_attempts=st.integers(0, 3),
    queued_seconds=st.floats(0, 2),
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100)
@given(
    st.lists(views, max_size=6, unique_by=lambda view: view.incarnation),
    st.integers(1, 600),
    st.booleans(),
)
def test_decision_uses_only_accepting_nodes_and_never_stalls(
    name: str, nodes: list[NodeView], tokens: int, decode: bool
) -> None:
    demand = PlacementDemand(
        tokens,
        tokens // 16 + 1,
        needs_prefill=True,
        needs_decode=decode,
        expected_output_tokens=4.0,
    )
    outlook = PlacementContext(NOW, COSTS, 1.0, token_bytes=1024, local_prefill_share=SHARE)
    decision = DisaggregationPolicy(POLICIES[name]()).decide_placement(demand, nodes, outlook)
    by_id = {node.incarnation: node for node in nodes}
    if decision is None:
        able = [node.role for node in nodes if node.can_accept(demand)]
        assert PREFILL not in able or (decode and DECODE not in able), (
            "a hand-off could have been made at once"
        )
        waited_for = any(node.role is PREFILL and not node.is_closed_to(demand) for node in nodes)
        assert DECODE not in able or waited_for
        return
    choice = decision.choice
    for chosen in filter(None, (choice.prefill, choice.decode)):
        assert by_id[chosen].can_accept(demand)
    assert (decision.prefill_site is PrefillSite.HAND_OFF) == (choice.prefill is not None)
    assert choice.decode is not None or not decode


# the whole brain


def test_auto_mode_prefills_on_decode_until_prefill_nodes_join() -> None:
    world = BrainHarness("auto", placement=PrefixAwarePolicy(), prefill_share=0.25)
    decode = world.join_node("d", DECODE)
    world.submit()
    (submit,) = world.messages_to(decode, DecodeOrder)
    assert (submit.kv_writer, submit.prefill_step_share) == (None, 0.25)
    assert world.brain.counters.placements == {("local", "no_prefill_node"): 1}
    told = world.explain_request(world.last_attempt_key(decode).request_id)
    assert (told.attempts[0].way, told.attempts[0].why) == ("local", "no_prefill_node")
    assert not told.attempts[0].HasField("other_way")
    prefill = world.join_node("p", PREFILL)
    world.send_heartbeat(prefill)
    request = world.submit(prompt=100)
    told = world.explain_request(request)
    assert told.attempts[0].HasField("other_way")
    assert told.attempts[0].why == "sooner"
    world.lose_node(prefill)
    world.submit()
    assert world.brain.counters.placements["local", "no_prefill_node"] >= 2


def test_fixed_mode_has_no_alternative_and_no_prefill_share() -> None:
    world = BrainHarness("disaggregated", prefill_share=0.25)
    world.join_node("p", PREFILL)
    decode = world.join_node("d", DECODE)
    request = world.submit()
    assert world.messages_to(decode, DecodeOrder)[0].prefill_step_share == 0.0
    told = world.explain_request(request).attempts[0]
    assert (told.way, told.why, told.HasField("other_way")) == ("hand_off", "mode", False)


def test_failed_handoff_is_not_retried_on_same_nodes() -> None:
    world = BrainHarness("auto", placement=PrefixAwarePolicy(), prefill_share=0.5, max_attempts=4)
    prefill, decode = world.join_node("p", PREFILL), world.join_node("d", DECODE)
    world.submit(prompt=16, max_tokens=40)
    first = world.last_attempt_key(decode)
    world.report_token(decode, first, 0)  # a resident: prompts beside it take longer
    request = world.submit(prompt=200)
    assert world.explain_request(request).attempts[0].way == "hand_off"
    key = world.last_attempt_key(decode)
    world.report_reserved(decode, key, prefill)
    world.report_failure(decode, key, ChecksumMismatch("a bit"))
    told = world.explain_request(request).attempts[1]
    assert (told.way, told.why) == ("local", "failed")


def test_node_view_counts_running_attempts() -> None:
    world = BrainHarness("auto")
    node = world.join_node("d", DECODE)
    world.submit()
    loads: NodeLoads = world.brain.parts.placement.loads
    view = loads.get_view(world.brain.node_registry.nodes[node])
    assert (view.attempts, view.running_attempts) == (1, 0)
    world.report_token(node, world.last_attempt_key(node), 0)
    assert loads.get_view(world.brain.node_registry.nodes[node]).running_attempts == 1
