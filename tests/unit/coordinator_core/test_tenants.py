"""Tenants, their limits and who is let in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded, Overloaded, Preempted
from baton.types import NodeName, Request, RequestId, SamplingParams, Standing
from coordinator.core import messages as m
from coordinator.core.admission import Admission, Bid
from coordinator.core.answer_time import AnswerTimes
from coordinator.core.cost_model import CostModel
from coordinator.core.drain_rate import Ahead, DrainRate
from coordinator.core.fair_order import Claim
from coordinator.core.loads import Loads
from coordinator.core.output_length import OutputLengths
from coordinator.core.prospects import Prospects
from coordinator.core.queue import WaitingQueue
from coordinator.core.registry import Registry
from coordinator.core.settings import QueueLimits
from coordinator.core.tenants import Tenant, Tenants, hash_key, salt_of
from coordinator.core.token_bucket import TokenBucket
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

CLASSES = ("premium", "standard", "batch")
GOLD, BULK = Standing("gold", "premium", 0), Standing("bulk", "standard", 1)


def known(*made: Tenant, reserve: float = 0.0, **waits: float) -> Tenants:
    keys = tuple((hash_key(f"key of {one.name}".encode()), one.name) for one in made)
    return Tenants(CLASSES, {one.name: one for one in made}, keys, reserve, waits)


class Idle:
    """Nodes that have nothing to do and compute at once."""

    seconds = wait = 0.0

    def computing(self, tokens: int) -> float:
        return self.seconds

    def answering(self, tenant: str, max_tokens: int) -> float:
        return self.seconds * max_tokens

    def node_wait(self, now: float) -> float:
        return self.wait

    def decode_full(self) -> bool:
        return False


class Busy(Idle):
    seconds, wait = 1.0, 2.0


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


# who they are


def test_a_key_is_found_and_no_other() -> None:
    tenants = known(Tenant("a", "standard"), Tenant("b", "batch"))
    found = tenants.find(b"key of b")
    assert found is not None
    assert found.name == "b"
    assert tenants.find(b"key of c") is None
    assert Tenants().find(b"") is None


@pytest.mark.parametrize(
    ("tenant_class", "priority", "level"),
    [("premium", 0, 0), ("premium", 2, 2), ("standard", 0, 1), ("standard", -5, 1), ("batch", 0, 2), ("batch", 99, 2)],
)
def test_priority_is_capped_by_the_class(tenant_class: str, priority: int, level: int) -> None:
    standing = known().standing(Tenant("t", tenant_class), priority)
    assert (standing.level, standing.tenant_class) == (level, CLASSES[level])


def test_without_a_file_priority_changes_nothing() -> None:
    assert Tenants().standing(Tenant(), 7) == Standing()


def test_salts_differ_by_tenant() -> None:
    assert len({salt_of("a"), salt_of("b"), b""}) == 3


# limits


@given(
    asks=st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 30)), max_size=60),
    rate=st.floats(0.5, 20),
    burst=st.floats(1, 50),
)
def test_a_bucket_lets_in_its_rate_and_one_burst(asks: list[tuple[float, float]], rate: float, burst: float) -> None:
    bucket, now, paid = TokenBucket.full(rate, burst, 0.0), 0.0, 0.0
    for passed, amount in asks:
        now += passed
        if bucket.wait(now) == 0.0:
            assert paid < burst + rate * now + 1e-6, "nothing is let in on credit"
            bucket.pay(amount, now)
            paid += amount
        else:
            now += bucket.wait(now) + 1e-6
            assert bucket.wait(now) == 0.0


def test_debts_survive_a_reload() -> None:
    queue = WaitingQueue()
    admission = Admission(queue, QueueLimits(10), Idle())
    admission.reload(known(Tenant("bulk", "standard", tokens_per_second=10, token_burst=10)), 0.0)
    admission.let_in(request(prompt=100), 0.0)
    admission.reload(known(Tenant("bulk", "standard", tokens_per_second=20, token_burst=10)), 0.0)
    with pytest.raises(Overloaded, match="tokens_per_second") as refused:
        admission.require(BULK, Bid(1, 60.0, 10), 0.0)
    assert refused.value.retry_after == pytest.approx(91 / 20)
    admission.require(BULK, Bid(1, 60.0, 10), 4.6)
    admission.reload(known(Tenant("other", "standard")), 5.0)
    admission.require(BULK, Bid(1, 60.0, 10), 5.0)


def request(prompt: int = 10, standing: Standing = BULK) -> Request:
    return Request(RequestId("r"), tuple(range(1, prompt + 1)), SamplingParams(4), 60.0, standing=standing)


# who is let in


def test_lower_classes_take_no_place_of_higher_ones_and_no_tenant_takes_all() -> None:
    queue = WaitingQueue()
    admission = Admission(queue, QueueLimits(8), Idle())
    admission.reload(known(Tenant("gold", "premium"), Tenant("bulk", "standard"), Tenant("meek", "standard")), 0.0)
    for number in range(4):
        admission.require(BULK, Bid(1, 60.0, 10), 0.0)
        queue.push(name(number), admission.let_in(request(), 0.0))
    with pytest.raises(Overloaded, match="its share of the free places is 4"):
        admission.require(BULK, Bid(1, 60.0, 10), 0.0)
    admission.require(Standing("meek", "standard", 1), Bid(2, 60.0, 10), 0.0)
    admission.require(GOLD, Bid(4, 60.0, 10), 0.0)


def test_the_wait_is_what_is_ahead_over_what_drains() -> None:
    rate = DrainRate()
    assert rate.predict_wait(Ahead(1e9, 1e9, True)) == 0.0
    rate.backlogged(0.0)
    for second in range(0, 20):
        rate.departed(100, second / 2)
    assert rate.predict_wait(Ahead(1000, 100, False)) == pytest.approx(5.0)
    assert rate.predict_wait(Ahead(1000, 100, True)) == pytest.approx(50.0)
    rate.empty()
    rate.backlogged(1000.0)
    rate.departed(100, 1000.5)
    assert rate.predict_wait(Ahead(1000, 100, False)) == pytest.approx(5.0), "idle time says nothing"


def test_a_wait_beyond_the_deadline_is_refused_with_the_time_to_come_back() -> None:
    queue = WaitingQueue()
    admission = Admission(queue, QueueLimits(1000), Idle())
    admission.reload(known(Tenant("bulk", "standard"), standard=3.0), 0.0)
    for number in range(60):
        queue.push(name(number), Claim("bulk", 1, tokens=100))
    for number in range(10):
        queue.take(name(number), (number + 1) / 2)
    with pytest.raises(Overloaded, match="the limit is 3 s") as refused:
        admission.require(BULK, Bid(1, 60.0, 100), 5.0)
    assert refused.value.retry_after == pytest.approx(22.0)
    admission.require(GOLD, Bid(1, 60.0, 100), 5.0)


def test_a_wait_that_leaves_no_time_for_the_prompt_is_refused_and_a_hopeless_prompt_is_not() -> None:
    admission = Admission(WaitingQueue(), QueueLimits(1000), Busy())
    admission.require(BULK, Bid(1, 3.1, 100), 0.0)
    with pytest.raises(Overloaded, match="would wait 2") as refused:
        admission.require(BULK, Bid(1, 2.9, 100), 0.0)
    assert refused.value.retry_after == pytest.approx(1.0)
    with pytest.raises(Overloaded, match="would wait 2"):
        admission.require(BULK, Bid(1, 12.9, 100, 10), 0.0)
    admission.require(BULK, Bid(1, 13.1, 100, 10), 0.0)
    admission.require(BULK, Bid(1, 0.9, 100), 0.0)


def test_what_cannot_be_served_in_time_is_known() -> None:
    costs = CostModel()
    prospects = Prospects(Registry(1.0, 1.0), Loads(), costs, AnswerTimes(OutputLengths()))
    assert prospects.too_late(10_000, 0, 0.001) is None, "nothing is known yet"
    for _ in range(50):
        costs.prefill_took(NodeName("p0"), 1000, 0, 1.0)
    assert isinstance(prospects.too_late(1000, 0, 0.4), DeadlineExceeded)
    assert prospects.too_late(1000, 0, 0.6) is None
    assert prospects.too_late(1000, 900, 0.4) is None, "a cache has most of it"


# in the brain


def test_a_share_of_the_blocks_is_kept_for_the_first_class() -> None:
    world = World(mode="colocated")
    tenants = known(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.5)
    world.brain.reload_tenants(tenants, world.now)
    node = world.join("d0", DECODE, max_num_seqs=16, max_batched_tokens=512)  # 32 blocks
    for _ in range(5):
        submit(world, BULK, prompt=64)  # 5 blocks with room to grow
    assert world.brain.placed_on(node) == 3
    for _ in range(3):
        submit(world, GOLD, prompt=64)
    assert world.brain.placed_on(node) == 6
    assert world.brain.queued == 2


def test_a_share_of_the_places_is_kept_for_the_first_class() -> None:
    world = World(mode="colocated", max_queue=32)
    world.brain.reload_tenants(known(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.25), world.now)
    node = world.join("d0", DECODE, max_num_seqs=8, num_blocks=64)
    for _ in range(10):
        submit(world, BULK, prompt=4)
    assert world.brain.placed_on(node) == 6
    for _ in range(3):
        submit(world, GOLD, prompt=4)
    assert world.brain.placed_on(node) == 8


def test_the_reserve_does_not_keep_out_who_needs_more_than_it_leaves() -> None:
    world = World(mode="colocated")
    world.brain.reload_tenants(known(Tenant("gold", "premium"), Tenant("bulk", "standard"), reserve=0.5), world.now)
    node = world.join("d0", DECODE, max_model_len=1024)  # 32 blocks
    submit(world, BULK, prompt=400)
    assert world.brain.placed_on(node) == 1


def test_a_burst_comes_to_a_node_as_it_is_computed() -> None:
    """Two steps' worth of prompts, so that a higher class may still pass the rest."""
    world = World(mode="colocated", max_queue=32)
    world.brain.reload_tenants(known(Tenant("gold", "premium"), Tenant("bulk", "standard")), world.now)
    node = world.join("d0", DECODE, max_num_seqs=16, num_blocks=64)  # 64 tokens a step
    for _ in range(12):
        submit(world, BULK, prompt=32)
    assert world.brain.placed_on(node) == 4
    gold = submit(world, GOLD, prompt=32)
    first = world.sent(node, m.Submit)[0].work.key
    world.token(node, first, 0)
    assert world.sent(node, m.Submit)[-1].work.key.request == gold
    assert world.brain.placed_on(node) == 5


def test_the_class_reaches_the_node_and_whoever_preempts_pays() -> None:
    world = World(mode="colocated")
    world.brain.reload_tenants(known(Tenant("bulk", "standard")), world.now)
    node = world.join("d0", DECODE)
    request = submit(world, BULK)
    (first,) = world.sent(node, m.Submit)
    assert first.work.request.standing == BULK
    assert first.work.prefill_payer == ""
    world.token(node, first.work.key, 0)
    world.say(node, m.AttemptFailed(first.work.key, Preempted("blocks"), "premium"))
    world.beat(node, room=32)
    second = world.sent(node, m.Submit)[-1]
    assert second.work.prefill_payer == "premium"
    world.token(node, second.work.key, 1)
    world.cancel(request)
    assert world.brain.counters.requests == {("cancelled", "standard"): 1}
    assert world.end(request).tenant_class == "standard"


def test_long_prompts_leave_the_window_to_short_ones() -> None:
    world = World(max_queue=32)
    prefill = world.join("p0", PREFILL, max_num_seqs=16, num_blocks=64)
    world.join("d0", DECODE, max_num_seqs=16, num_blocks=64)
    world.submit(prompt=200)
    for _ in range(8):
        world.submit(prompt=16)
    assert world.brain.placed_on(prefill) == 5, "64 tokens of the long one, and 4 short ones"


def submit(world: World, standing: Standing, prompt: int = 20) -> RequestId:
    arrival = world.arrival(prompt)
    request = Request(arrival.request.id, arrival.request.prompt, arrival.request.sampling, 60.0, standing=standing)
    world.effects += world.brain.submit(request, world.now)
    return request.id
