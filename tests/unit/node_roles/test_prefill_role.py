"""The compute-bound role with everything real but the plane: every end of every attempt returns
every block."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster_link.messages import CancelOrder, PrefillOrder, TicketOrder
from baton.config.settings import Config
from baton.errors import Cancelled, NodeFailed, PeerUnreachable
from baton.types import (
    AttemptSpec,
    BlockIndex,
    Incarnation,
    NodeName,
    PeerAddress,
    SegmentRef,
    Ticket,
    TicketId,
)
from kv_transfer.plane import HandoffStats, LinkCost, OutboundAborted, OutboundCommitted
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.node_commands import CoordinatorLost, NodeJoined
from node_engine.core.sequences.sequence import SequenceState
from node_engine.core.step.engine import LayerCallback
from node_engine.core.step.step_batch import StepBatch
from node_engine.paced.paced_engine import PACED_LAYOUT
from tests.paced_reference import paced_reference_tokens
from tests.unit.node_roles.prefill_bench import (
    PrefillBench,
)
from tests.unit.node_roles.role_bench import make_work, tokens_of

REPORT = HandoffStats("memory", 1, 1, 1, 0.0, 0.0)
LAYERS = PACED_LAYOUT.num_layers


def make_ticket(work: AttemptSpec) -> Ticket:
    peer = PeerAddress(NodeName("d"), Incarnation("decode"), "host", "tcp://127.0.0.1:2")
    offsets = tuple(range(0, 8 * 64, 64))
    return Ticket(
        TicketId("t"),
        work.key,
        peer,
        Incarnation("me"),
        0,
        offsets,
        9,
        9.0,
        "memory",
        SegmentRef("s", peer.incarnation),
        1,
    )


def test_every_layer_of_every_block_is_announced_once_and_then_sealed() -> None:
    node, work = PrefillBench(), make_work(range(1, 151))
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    assert node.plane.opened == {work.key: 150}
    while node.step():
        pass
    announced = [
        (layer, block)
        for layer, first, source in node.plane.ready[work.key]
        for block in range(first, first + len(source))
    ]
    assert sorted(announced) == [(layer, block) for layer in range(LAYERS) for block in range(10)]
    assert node.plane.sealed[work.key].emitted_token_ids == tuple(
        paced_reference_tokens(work.request.prompt_token_ids, 1, 1000)
    )
    ended = node.pop_messages("prefill_ended")[0]
    assert (ended.computed_tokens, ended.cached_tokens, ended.compute_seconds) == (150, 0, 1.5)
    assert node.count_held_blocks() == {
        BlockState.IN_USE: 10
    }  # pinned until the plane has committed
    node.send_item(OutboundCommitted(work.key, REPORT))
    assert node.count_held_blocks() == {}
    assert node.pop_messages("handed_off")[0].report.computed_tokens == 150
    assert node.sent_messages == []


def test_a_cached_prefix_is_announced_whole_before_the_first_chunk() -> None:
    node = PrefillBench()
    first, second = (
        make_work(range(1, 81), request="a"),
        make_work([*range(1, 65), 900, 901], request="b"),
    )
    for work in (first, second):
        node.send_item(PrefillOrder(work, needs_no_decode=False))
        while node.step():
            pass
        node.send_item(OutboundCommitted(work.key, REPORT))
    assert {
        block
        for _, start, source in node.plane.ready[second.key]
        for block in range(start, start + len(source))
    } == set(range(5))
    assert node.plane.ready[second.key][0][1:][0] == 0
    assert node.pop_messages("prefill_ended")[1].cached_tokens == 64


@pytest.mark.parametrize("endpoint", ["", "device://baton-writer-x.process"])
def test_layers_are_saved_to_host_memory_only_for_a_plane_that_reads_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = PrefillBench()
    node.plane.endpoint = endpoint
    reads_host = not endpoint
    read: list[int] = []  # blocks of each step that the engine has to bring to host memory
    saved: list[int] = []
    run, save = node.engine.run, node.engine.save_blocks

    def run_step(batch: StepBatch, on_layer: LayerCallback | None = None) -> object:
        read.append(len(on_layer.blocks) if on_layer else 0)
        return run(batch, on_layer)

    def save_blocks(blocks: Sequence[BlockIndex]) -> object:
        saved.append(len(blocks))
        return save(blocks)

    monkeypatch.setattr(node.engine, "run", run_step)
    monkeypatch.setattr(node.engine, "save_blocks", save_blocks)
    for name, tokens in (("a", range(1, 81)), ("b", [*range(1, 65), 900, 901])):
        work = make_work(tokens, request=name)
        node.send_item(PrefillOrder(work, needs_no_decode=False))
        while node.step():
            pass
        node.send_item(OutboundCommitted(work.key, REPORT))
    assert sum(read) == (6 if reads_host else 0)
    assert saved[:1] == ([4] if reads_host else [0])


def test_report_says_by_how_much_a_hand_off_slowed_its_prefill() -> None:
    """Of the steps' duration: what announcing took, of cached blocks as well, and what the engine
    waited for."""
    node = PrefillBench(config=Config(layers_per_message=1))
    node.plane.on_announce = lambda: node.clock.advance(0.25)
    first, second = (
        make_work(range(1, 81), request="a"),
        make_work([*range(1, 65), 900, 901], request="b"),
    )
    slowed = []
    for work in (first, second):
        node.send_item(PrefillOrder(work, needs_no_decode=False))
        while node.step():
            pass
        node.send_item(OutboundCommitted(work.key, REPORT))
        slowed.append(node.pop_messages("handed_off")[0].report.slowed_seconds)
    # 80 tokens in two steps of at most 64; 64 from the cache, announced at once, and one step
    assert slowed == [2 * LAYERS * 0.25, 0.25 + LAYERS * 0.25]
    assert node.role.counters()["baton_prefill_slowed_seconds_total"] == sum(slowed)


def test_waits_of_the_engine_slow_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    node, work = PrefillBench(), make_work(range(1, 41))
    run = node.engine.run

    def run_slowly(batch: StepBatch, on_layer: LayerCallback | None = None) -> Any:
        assert on_layer is not None
        on_layer.slowed_seconds += 0.5
        return run(batch, on_layer)

    monkeypatch.setattr(node.engine, "run", run_slowly)
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    while node.step():
        pass
    node.send_item(OutboundCommitted(work.key, REPORT))
    assert node.pop_messages("handed_off")[0].report.slowed_seconds == 0.5


@pytest.mark.parametrize(
    ("fixed", "link", "groups"),
    [
        (1, LinkCost(), [1] * LAYERS),
        (3, LinkCost(), [3, LAYERS - 3]),
        (99, LinkCost(), [LAYERS]),
        (0, LinkCost(message_seconds=10.0), [LAYERS]),  # a message costs more than computing
        (0, LinkCost(1e-5, 1e-7), [1] * LAYERS),  # the link takes a third of computing
    ],
)
def test_layers_are_announced_in_groups(fixed: int, link: LinkCost, groups: list[int]) -> None:
    node, work = PrefillBench(config=Config(layers_per_message=fixed)), make_work(range(1, 60))
    node.plane.link_cost = link
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    while node.step():
        pass
    assert node.plane.groups == groups
    announced = [layer for layer, _, source in node.plane.ready[work.key] if len(source) == 4]
    assert announced == list(range(LAYERS))
    node.send_item(OutboundCommitted(work.key, REPORT))
    assert node.pop_messages("handed_off")[0].report.group_layers == groups[0]
    counters = node.role.counters()
    assert counters["baton_prefill_layer_groups_total"] == len(groups)
    assert counters["baton_prefill_grouped_layers_total"] == LAYERS


def test_steps_before_the_last_one_hand_over_whole_where_that_is_hidden() -> None:
    """The later steps take longer than the link: no message needs to leave early."""
    node = PrefillBench()
    node.plane.link_cost = LinkCost(1e-5, 1e-5)  # 40 ms for a layer of 64 tokens
    for number in range(2):  # the first one shows what steps take: STEP_SECONDS
        node.plane.groups.clear()
        tokens = [number + 1, *range(2, 151)]
        node.send_item(PrefillOrder(make_work(tokens, request=f"{number}"), needs_no_decode=False))
        while node.step():
            pass
    # 64 tokens each, and 22 in the last step
    assert node.plane.groups == [LAYERS, LAYERS] + [1] * LAYERS


def test_a_prefill_without_a_hand_off_is_not_slowed() -> None:
    node, work = PrefillBench(), make_work(range(1, 20), max_tokens=1)
    node.send_item(PrefillOrder(work, needs_no_decode=True))
    node.step()
    assert node.role.counters()["baton_prefill_slowed_seconds_total"] == 0.0


def test_prefill_without_decode_answers_itself() -> None:
    node, work = PrefillBench(), make_work(range(1, 20), max_tokens=1)
    node.send_item(PrefillOrder(work, needs_no_decode=True))
    node.step()
    assert tokens_of(node.pop_messages("tokens")[0]) == [
        (0, paced_reference_tokens(work.request.prompt_token_ids, 1, 1000)[0])
    ]
    assert node.plane.opened == {}
    assert node.count_held_blocks() == {}
    assert node.role.num_held_attempts == 0


def drive_waiting(node: PrefillBench, work: AttemptSpec) -> None:
    node.send_item(PrefillOrder(work, needs_no_decode=False))


def drive_prefilling(node: PrefillBench, work: AttemptSpec) -> None:
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    node.step()


def drive_handing_off(node: PrefillBench, work: AttemptSpec) -> None:
    """Computed and sealed: the sequence itself has ended, and only the pins are left."""
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    node.send_item(TicketOrder(make_ticket(work)))
    while node.step():
        pass


DRIVERS_BY_STATE: dict[SequenceState, Callable[[PrefillBench, AttemptSpec], None] | None] = {
    SequenceState.WAITING: drive_waiting,
    SequenceState.PREFILLING: drive_prefilling,
    SequenceState.HANDING_OFF: drive_handing_off,
    SequenceState.AWAITING_KV: None,  # decode's
    SequenceState.RUNNING: None,  # decode's
    SequenceState.FINISHED: None,  # nothing is left to end
}


def test_every_state_is_covered() -> None:
    assert set(DRIVERS_BY_STATE) == set(SequenceState)


ENDS: dict[str, Callable[[PrefillBench, AttemptSpec], None]] = {
    "cancel": lambda node, work: node.send_item(CancelOrder(work.key, Cancelled("client gone"))),
    "peer gone": lambda node, work: node.send_item(
        OutboundAborted(work.key, PeerUnreachable("decode is gone"))
    ),
    "coordinator lost": lambda node, work: node.send_item(CoordinatorLost()),
    "joined anew": lambda node, work: node.send_item(NodeJoined(Incarnation("again"))),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "state",
    [state for state, drive in DRIVERS_BY_STATE.items() if drive],
    ids=lambda state: state.value,
)
def test_every_end_in_every_state_returns_every_block(state: SequenceState, end: str) -> None:
    node, work = PrefillBench(), make_work(range(1, 151))
    drive = DRIVERS_BY_STATE[state]
    assert drive is not None
    drive(node, work)
    node.pop_messages("prefill_ended")
    ENDS[end](node, work)
    while node.step():
        pass
    if end != "peer gone":
        node.answer_aborts()
    assert node.count_held_blocks() == {}
    assert node.role.num_held_attempts == 0
    assert len(node.pop_messages("failed")) == (1 if end == "peer gone" else 0)
    assert node.sent_messages == []


def test_what_the_plane_may_still_read_stays_pinned_after_a_cancel() -> None:
    node, work = PrefillBench(), make_work(range(1, 151))
    drive_prefilling(node, work)
    node.send_item(CancelOrder(work.key, Cancelled("client gone")))
    assert node.count_held_blocks() == {BlockState.IN_USE: 4}
    node.answer_aborts()
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize("needs_no_decode", [False, True])
def test_layers_are_announced_only_for_a_hand_off(needs_no_decode: bool) -> None:
    node = PrefillBench()
    node.send_item(PrefillOrder(make_work(range(1, 151)), needs_no_decode=needs_no_decode))
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    assert (node.role.before_step(plan.batch) is None) == needs_no_decode


def test_a_failed_step_ends_its_attempts() -> None:
    node, work = PrefillBench(), make_work(range(1, 151))
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    on_layer = node.role.before_step(plan.batch)
    assert on_layer is not None
    on_layer(0)
    node.role.on_step_failed(plan.batch, NodeFailed("the device fell off"))
    assert node.pop_messages("failed")[0].error.code == "node_failed"
    assert node.count_held_blocks() == {BlockState.IN_USE: 4}
    node.answer_aborts()
    assert node.count_held_blocks() == {}


def test_handoff_aborted_before_its_command() -> None:
    node, work = PrefillBench(), make_work(range(1, 40))
    node.role.preview_command(PrefillOrder(work, needs_no_decode=False))
    node.role.handle_item(OutboundAborted(work.key, PeerUnreachable("decode is gone")))
    node.role.handle_item(PrefillOrder(work, needs_no_decode=False))
    assert node.pop_messages("failed")[0].error.code == "peer_gone"
    assert node.count_held_blocks() == {}
    assert not node.step()


def test_a_token_out_of_range_is_refused() -> None:
    node, work = PrefillBench(), make_work([1, 2, 1000])
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    assert node.pop_messages("failed")[0].error.code == "invalid_request"
    node.answer_aborts()
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize("bound_to", [b"", b"x" * 32])
def test_a_request_that_is_bound_to_another_model_is_not_computed(bound_to: bytes) -> None:
    node, work = PrefillBench(), replace(make_work([1, 2, 3]), identity_digest=bound_to)
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    assert node.pop_messages("failed")[0].error.code == "wrong_model"
    node.answer_aborts()
    assert not node.step()
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize("needs_no_decode", [True, False])
def test_a_context_that_is_too_long_is_refused_and_no_error(needs_no_decode: bool) -> None:
    node, work = PrefillBench(num_blocks=300), make_work([1] * 4096, max_tokens=1)
    node.send_item(PrefillOrder(work, needs_no_decode=needs_no_decode))
    (refused,) = node.pop_messages("refused")
    assert (refused.needed, refused.free) == (301, 300)
    assert node.pop_messages("failed") == []
    node.answer_aborts()
    assert node.count_held_blocks() == {}


def test_prefill_needs_no_room_for_the_output() -> None:
    node = PrefillBench()
    node.send_item(PrefillOrder(make_work([1, 2, 3], max_tokens=5000), needs_no_decode=False))
    assert node.pop_messages("refused") == node.pop_messages("failed") == []


def test_repeated_command_changes_nothing() -> None:
    node, work = PrefillBench(), make_work(range(1, 151))
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    node.step()
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    while node.step():
        pass
    assert len(node.pop_messages("prefill_ended")) == 1
    node.send_item(OutboundCommitted(work.key, REPORT))
    node.send_item(OutboundCommitted(work.key, REPORT))
    assert len(node.pop_messages("handed_off")) == 1
    assert node.count_held_blocks() == {}
