"""Who gives way, and where the device's time went."""

from dataclasses import replace

import pytest

from baton.types import AttemptSpec, Principal
from node_engine.core.metrics.device_time import DeviceTime
from node_engine.core.scheduling.preemption import (
    CheapestToResumeFirst,
    MostBlocksFirst,
    select_victim,
)
from node_engine.core.sequences.outcomes import SequenceFailed
from node_engine.core.sequences.sequence import Sequence
from tests.unit.node_engine.core.stepped_node import BLOCK, SteppedNode, make_work

NAMES = ("premium", "standard", "batch")


def make_tenant_work(name: str, level: int, length: int, max_tokens: int = 40) -> AttemptSpec:
    plain_work = make_work(
        name,
        [(len(name) * 31 + ord(name[-1]) * 7 + each) % 997 + 1 for each in range(length)],
        max_tokens,
    )
    standing = Principal("t", NAMES[level], level)
    return replace(plain_work, request=replace(plain_work.request, principal=standing))


def run_all_prefills(node: SteppedNode, *works: AttemptSpec) -> list[Sequence]:
    sequences = [node.add_work(each) for each in works]
    while any(each.num_computed_tokens < each.context_len for each in sequences):
        node.step()
    return sequences


def test_the_lowest_class_then_most_blocks_or_cheapest_and_never_a_higher_class() -> None:
    node = SteppedNode(max_batched_tokens=512)
    a, b, c, d = run_all_prefills(
        node,
        make_tenant_work("a", 1, 100),
        make_tenant_work("b", 2, 40),
        make_tenant_work("c", 2, 90),
        make_tenant_work("d", 0, 200),
    )
    assert select_victim(a, [a, b, c, d], MostBlocksFirst()) is c
    assert select_victim(a, [a, b, c, d], CheapestToResumeFirst()) is b
    assert select_victim(a, [a, d], MostBlocksFirst()) is a
    assert select_victim(b, [a, b, d], MostBlocksFirst()) is b


def test_nearly_done_sequences_are_spared() -> None:
    node = SteppedNode(max_batched_tokens=512)
    long, ending, asking = run_all_prefills(
        node,
        make_tenant_work("a", 1, 60),
        make_tenant_work("b", 2, 90, max_tokens=9),
        make_tenant_work("c", 1, 20),
    )
    assert select_victim(asking, [long, ending, asking], MostBlocksFirst()) is long
    assert select_victim(asking, [ending], MostBlocksFirst()) is ending


def test_a_preemption_names_who_caused_it() -> None:
    node = SteppedNode(6, max_batched_tokens=512)
    run_all_prefills(
        node, make_tenant_work("bulk", 1, 2 * BLOCK - 1), make_tenant_work("gold", 0, 3 * BLOCK - 1)
    )
    node.run()
    (failed,) = [each for each in node.outcomes if isinstance(each, SequenceFailed)]
    assert (failed.sequence.tenant_class, failed.preempting_class) == ("standard", "premium")


def test_device_time_adds_up_and_is_charged_to_its_cause() -> None:
    node, time = SteppedNode(max_batched_tokens=512), DeviceTime()
    node.add_work(make_tenant_work("a", 1, 30, 3))
    node.add_work(replace(make_tenant_work("b", 1, 50, 3), prefill_charged_class="premium"))
    for _ in range(3):
        plan = node.scheduler.schedule_step()
        assert plan.batch is not None
        time.charge_step(plan.batch, node.scheduler.sequences_in_flight, 0.8)
        node.scheduler.update_from_results(plan.batch, node.engine.run(plan.batch))
    counted = time.counters()
    assert counted.pop("baton_device_busy_seconds_total") == pytest.approx(2.4)
    assert counted == pytest.approx(
        {
            'baton_device_seconds_total{phase="prefill",class="standard"}': 0.3,
            'baton_device_seconds_total{phase="prefill",class="premium"}': 0.5,
            'baton_device_seconds_total{phase="decode",class="standard"}': 1.6,
        }
    )


def test_a_long_prompt_that_has_begun_gets_a_block_in_every_step() -> None:
    node = SteppedNode(200, max_num_seqs=8, max_batched_tokens=64)
    long = node.add_work(make_tenant_work("long", 0, 640))
    node.step()
    for number in range(12):
        node.add_work(make_tenant_work(f"s{number}", 0, 48, max_tokens=1))
        before = long.num_computed_tokens
        node.step()
        assert long.num_computed_tokens >= before + BLOCK


def test_requeued_prefill_is_recomputed_at_the_takers_cost() -> None:
    node = SteppedNode(6, max_batched_tokens=512)
    unticketed = node.add_work(make_tenant_work("unticketed", 1, 3 * BLOCK), is_prefill_only=True)
    node.step()
    assert unticketed.num_computed_tokens == 3 * BLOCK
    (gold,) = run_all_prefills(node, make_tenant_work("gold", 0, 5 * BLOCK - 1))
    assert unticketed.num_computed_tokens == 0
    assert [unticketed.charged_class_at(position) for position in (0, 3 * BLOCK - 1)] == [
        "premium",
        "premium",
    ]
    assert gold.charged_class_at(0) == "premium"


def test_lower_class_is_preempted_at_the_takers_cost() -> None:
    node = SteppedNode(4, max_batched_tokens=512)
    run_all_prefills(
        node,
        make_tenant_work("gold", 0, 2 * BLOCK - 4, 20),
        make_tenant_work("bulk", 1, 2 * BLOCK - 2),
    )
    node.run()
    (failed,) = [each for each in node.outcomes if isinstance(each, SequenceFailed)]
    assert (failed.sequence.tenant_class, failed.preempting_class) == ("standard", "premium")
