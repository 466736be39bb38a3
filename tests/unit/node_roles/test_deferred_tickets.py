"""A ticket that comes while a step is launched on a device reaches the plane after the launch."""

import pytest

from baton.cluster_link.messages import CancelOrder, PrefillOrder, TicketOrder
from baton.errors import Cancelled, NodeFailed
from baton.types import AttemptKey, AttemptSpec, Ticket
from node_engine.core.step.engine import LayerCallback
from node_engine.core.step.step_batch import StepBatch
from tests.device_events import IdentityEvent
from tests.unit.node_roles.prefill_bench import PrefillBench
from tests.unit.node_roles.role_bench import make_work
from tests.unit.node_roles.test_prefill_role import LAYERS, make_ticket


def begin_step(node: PrefillBench, work: AttemptSpec) -> tuple[StepBatch, LayerCallback]:
    """Schedule the first step of a new request and let the role prepare for it."""
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    on_layer = node.role.before_step(plan.batch)
    assert on_layer is not None
    return plan.batch, on_layer


@pytest.fixture
def node() -> PrefillBench:
    node = PrefillBench()
    node.plane.endpoint = "device://baton-writer-x.process"
    return node


def test_a_ticket_waits_for_the_end_of_a_launch(node: PrefillBench) -> None:
    work = make_work(range(1, 40))
    _, on_layer = begin_step(node, work)
    on_layer.on_launching()
    ticket = make_ticket(work)
    node.role.preview_command(TicketOrder(ticket))
    assert node.plane.tickets == {}
    on_layer.on_launched([IdentityEvent() for _ in range(LAYERS)])
    assert node.plane.tickets == {work.key: ticket}


def test_without_a_launch_a_ticket_is_passed_on_at_once(node: PrefillBench) -> None:
    work = make_work(range(1, 40))
    ticket = make_ticket(work)
    node.role.preview_command(TicketOrder(ticket))
    assert node.plane.tickets == {work.key: ticket}


def test_a_step_that_is_not_launched_on_a_device_keeps_no_ticket_waiting(
    node: PrefillBench,
) -> None:
    work = make_work(range(1, 40))
    begin_step(node, work)
    node.role.preview_command(TicketOrder(make_ticket(work)))
    assert set(node.plane.tickets) == {work.key}


def test_the_end_of_a_step_ends_the_wait(node: PrefillBench) -> None:
    work = make_work(range(1, 40))
    batch, on_layer = begin_step(node, work)
    on_layer.on_launching()
    node.role.preview_command(TicketOrder(make_ticket(work)))
    node.role.after_step(batch, (), seconds=0.1)
    assert set(node.plane.tickets) == {work.key}


def test_a_failed_step_ends_the_wait(node: PrefillBench) -> None:
    work = make_work(range(1, 40))
    batch, on_layer = begin_step(node, work)
    on_layer.on_launching()
    node.role.preview_command(TicketOrder(make_ticket(work)))
    node.role.on_step_failed(batch, NodeFailed("the device fell off"))
    assert set(node.plane.tickets) == {work.key}


def test_what_is_said_of_a_hand_off_later_follows_its_ticket(
    node: PrefillBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, calls = make_work(range(1, 40)), []

    def set_ticket(key: AttemptKey, ticket: Ticket) -> None:
        calls.append("ticket")

    def abort_handoff(key: AttemptKey, error: Exception) -> None:
        calls.append("abort")

    monkeypatch.setattr(node.plane, "set_ticket", set_ticket)
    monkeypatch.setattr(node.plane, "abort_handoff", abort_handoff)
    begin_step(node, work)[1].on_launching()
    node.role.preview_command(TicketOrder(make_ticket(work)))
    node.role.preview_command(CancelOrder(work.key, Cancelled("client gone")))
    assert calls == ["ticket", "abort"]
