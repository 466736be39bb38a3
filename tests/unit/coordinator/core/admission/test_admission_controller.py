"""Who is admitted: places in the queue, predicted waits and rate limits."""

import pytest

from baton.errors import Overloaded
from baton.types import Principal, Request, RequestId, SamplingParams
from coordinator.core.admission.admission_controller import AdmissionController, AdmissionRequest
from coordinator.core.admission.tenants import (
    Tenant,
)
from coordinator.core.admission.waiting_queue import QueueEntry, WaitingQueue
from coordinator.core.common.settings import QueueLimits
from coordinator.core.estimates.workload import BacklogAhead, ServiceRate
from tests.unit.coordinator.core.admission.tenant_tables import (
    BULK,
    GOLD,
    make_tenant_table,
)


class IdleNodes:
    """Nodes that have nothing to do and compute at once."""

    seconds = wait = 0.0

    def prefill_seconds(self, tokens: int) -> float:
        return self.seconds

    def decode_seconds(self, tenant: str, max_tokens: int) -> float:
        return self.seconds * max_tokens

    def node_wait_seconds(self, now: float) -> float:
        return self.wait

    def is_decode_full(self) -> bool:
        return False


class BusyNodes(IdleNodes):
    seconds, wait = 1.0, 2.0


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


def test_token_bucket_debts_survive_a_reload_of_tenants() -> None:
    queue = WaitingQueue()
    admission = AdmissionController(queue, QueueLimits(10), IdleNodes())
    admission.reload_tenants(
        make_tenant_table(Tenant("bulk", "standard", tokens_per_second=10, token_burst=10)), 0.0
    )
    admission.admit_request(request(prompt=100), 0.0)
    admission.reload_tenants(
        make_tenant_table(Tenant("bulk", "standard", tokens_per_second=20, token_burst=10)), 0.0
    )
    with pytest.raises(Overloaded, match="tokens_per_second") as refused:
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 0.0)
    assert refused.value.retry_after == pytest.approx(91 / 20)
    admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 4.6)
    admission.reload_tenants(make_tenant_table(Tenant("other", "standard")), 5.0)
    admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 5.0)


def request(prompt: int = 10, standing: Principal = BULK) -> Request:
    return Request(
        RequestId("r"), tuple(range(1, prompt + 1)), SamplingParams(4), 60.0, principal=standing
    )


def test_queue_places_are_bounded_by_class_and_tenant() -> None:
    queue = WaitingQueue()
    admission = AdmissionController(queue, QueueLimits(8), IdleNodes())
    admission.reload_tenants(
        make_tenant_table(
            Tenant("gold", "premium"), Tenant("bulk", "standard"), Tenant("meek", "standard")
        ),
        0.0,
    )
    for number in range(4):
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 0.0)
        queue.add_request(name(number), admission.admit_request(request(), 0.0))
    with pytest.raises(Overloaded, match="its share of the free places is 4"):
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 10), 0.0)
    admission.check_admission(Principal("meek", "standard", 1), AdmissionRequest(2, 60.0, 10), 0.0)
    admission.check_admission(GOLD, AdmissionRequest(4, 60.0, 10), 0.0)


def test_predicted_wait_is_backlog_over_service_rate() -> None:
    rate = ServiceRate()
    assert rate.predict_wait_seconds(BacklogAhead(1e9, 1e9, True)) == 0.0
    rate.start_backlog(0.0)
    for second in range(0, 20):
        rate.record_placement(100, second / 2)
    assert rate.predict_wait_seconds(BacklogAhead(1000, 100, False)) == pytest.approx(5.0)
    assert rate.predict_wait_seconds(BacklogAhead(1000, 100, True)) == pytest.approx(50.0)
    rate.end_backlog()
    rate.start_backlog(1000.0)
    rate.record_placement(100, 1000.5)
    assert rate.predict_wait_seconds(BacklogAhead(1000, 100, False)) == pytest.approx(5.0), (
        "idle time says nothing"
    )


def test_wait_beyond_deadline_is_rejected_with_retry_after() -> None:
    queue = WaitingQueue()
    admission = AdmissionController(queue, QueueLimits(1000), IdleNodes())
    admission.reload_tenants(make_tenant_table(Tenant("bulk", "standard"), standard=3.0), 0.0)
    for number in range(60):
        queue.add_request(name(number), QueueEntry("bulk", 1, prompt_tokens=100))
    for number in range(10):
        queue.take_request(name(number), (number + 1) / 2)
    with pytest.raises(Overloaded, match="the limit is 3 s") as refused:
        admission.check_admission(BULK, AdmissionRequest(1, 60.0, 100), 5.0)
    assert refused.value.retry_after == pytest.approx(22.0)
    admission.check_admission(GOLD, AdmissionRequest(1, 60.0, 100), 5.0)


def test_wait_leaving_no_prefill_time_is_rejected_but_hopeless_prompt_is_admitted() -> None:
    admission = AdmissionController(WaitingQueue(), QueueLimits(1000), BusyNodes())
    admission.check_admission(BULK, AdmissionRequest(1, 3.1, 100), 0.0)
    with pytest.raises(Overloaded, match="would wait 2") as refused:
        admission.check_admission(BULK, AdmissionRequest(1, 2.9, 100), 0.0)
    assert refused.value.retry_after == pytest.approx(1.0)
    with pytest.raises(Overloaded, match="would wait 2"):
        admission.check_admission(BULK, AdmissionRequest(1, 12.9, 100, 10), 0.0)
    admission.check_admission(BULK, AdmissionRequest(1, 13.1, 100, 10), 0.0)
    admission.check_admission(BULK, AdmissionRequest(1, 0.9, 100), 0.0)
