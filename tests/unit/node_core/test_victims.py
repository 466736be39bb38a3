"""Who gives way, and where the device's time went."""

from dataclasses import replace

import pytest

from baton.types import Standing, Work
from node_engine.core.device_time import DeviceTime
from node_engine.core.outcome import Failed
from node_engine.core.sequence import Sequence
from node_engine.core.victims import CheapestToResume, MostBlocks, victim_for
from tests.unit.node_core.nodes import BLOCK, Node, work

NAMES = ("premium", "standard", "batch")


def job(name: str, level: int, length: int, max_tokens: int = 40) -> Work:
    made = work(name, [(len(name) * 31 + ord(name[-1]) * 7 + each) % 997 + 1 for each in range(length)], max_tokens)
    standing = Standing("t", NAMES[level], level)
    return replace(made, request=replace(made.request, standing=standing))


def residents(node: Node, *jobs: Work) -> list[Sequence]:
    sequences = [node.add(each) for each in jobs]
    while any(each.num_computed < each.context_len for each in sequences):
        node.step()
    return sequences


def test_the_lowest_class_then_most_blocks_or_cheapest_and_never_a_higher_class() -> None:
    node = Node(max_batched_tokens=512)
    a, b, c, d = residents(node, job("a", 1, 100), job("b", 2, 40), job("c", 2, 90), job("d", 0, 200))
    assert victim_for(a, [a, b, c, d], MostBlocks()) is c
    assert victim_for(a, [a, b, c, d], CheapestToResume()) is b
    assert victim_for(a, [a, d], MostBlocks()) is a
    assert victim_for(b, [a, b, d], MostBlocks()) is b


def test_nobody_who_is_nearly_done() -> None:
    node = Node(max_batched_tokens=512)
    long, ending, asking = residents(node, job("a", 1, 60), job("b", 2, 90, max_tokens=9), job("c", 1, 20))
    assert victim_for(asking, [long, ending, asking], MostBlocks()) is long
    assert victim_for(asking, [ending], MostBlocks()) is ending


def test_a_preemption_names_who_caused_it() -> None:
    node = Node(6, max_batched_tokens=512)
    residents(node, job("bulk", 1, 2 * BLOCK - 1), job("gold", 0, 3 * BLOCK - 1))
    node.run()
    (failed,) = [each for each in node.outcomes if isinstance(each, Failed)]
    assert (failed.sequence.tenant_class, failed.caused_by) == ("standard", "premium")


def test_device_time_adds_up_and_is_charged_to_who_made_it_necessary() -> None:
    node, time = Node(max_batched_tokens=512), DeviceTime()
    node.add(job("a", 1, 30, 3))
    node.add(replace(job("b", 1, 50, 3), prefill_payer="premium"))
    for _ in range(3):
        plan = node.scheduler.next_step()
        assert plan.batch is not None
        time.add(plan.batch, node.scheduler.computing, 0.8)
        node.scheduler.update(plan.batch, node.engine.run(plan.batch))
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
    node = Node(200, max_num_seqs=8, max_batched_tokens=64)
    long = node.add(job("long", 0, 640))
    node.step()
    for number in range(12):
        node.add(job(f"s{number}", 0, 48, max_tokens=1))
        before = long.num_computed
        node.step()
        assert long.num_computed >= before + BLOCK


def test_what_is_dropped_for_a_higher_class_is_computed_again_at_its_cost() -> None:
    node = Node(6, max_batched_tokens=512)
    guess = node.add(job("guess", 1, 3 * BLOCK), hand_off=True)
    node.step()
    assert guess.num_computed == 3 * BLOCK
    (gold,) = residents(node, job("gold", 0, 5 * BLOCK - 1))
    assert guess.num_computed == 0
    assert [guess.payer(position) for position in (0, 3 * BLOCK - 1)] == ["premium", "premium"]
    assert gold.payer(0) == "premium"


def test_the_last_of_a_lower_class_gives_way_to_a_higher_one_at_its_cost() -> None:
    node = Node(4, max_batched_tokens=512)
    residents(node, job("gold", 0, 2 * BLOCK - 4, 20), job("bulk", 1, 2 * BLOCK - 2))
    node.run()
    (failed,) = [each for each in node.outcomes if isinstance(each, Failed)]
    assert (failed.sequence.tenant_class, failed.caused_by) == ("standard", "premium")
