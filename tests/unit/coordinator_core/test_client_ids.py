"""The names by which operators find a request: bounded, and never taken for another request."""

import pytest

from baton.errors import InvalidRequest
from baton.types import RequestId
from coordinator.core.client_ids import MAX_CLIENT_IDS, MAX_REQUESTS, ClientIds, request_id_of


@pytest.mark.parametrize("name", ["ab12", "cmpl-ab12", "chatcmpl-ab12"])
def test_ids_of_bodies_are_ids_of_requests(name: str) -> None:
    assert request_id_of(name) == "ab12"


def test_a_clients_id_names_its_request() -> None:
    ids = ClientIds()
    ids.add("order 66", RequestId("one"))
    assert ids.find_request("order 66") == "one"
    assert ids.find_request("order 67") is None


def test_several_requests_of_one_id_are_named_and_none_is_chosen() -> None:
    ids = ClientIds()
    for number in range(3):
        ids.add("job", RequestId(f"request-{number}"))
    with pytest.raises(InvalidRequest, match=r"3 requests .* 'job'.* request-0, request-1, request-2") as caught:
        ids.find_request("job")
    assert caught.value.param == "request_id"


def test_what_is_kept_is_bounded_in_ids_and_in_requests_of_one() -> None:
    ids = ClientIds()
    for number in range(MAX_CLIENT_IDS + 10):
        ids.add(f"id-{number}", RequestId(str(number)))
    assert len(ids) == MAX_CLIENT_IDS
    assert ids.find_request("id-9") is None
    assert ids.find_request("id-10") == "10"
    for number in range(100):
        ids.add("busy", RequestId(f"r{number}"))
    with pytest.raises(InvalidRequest, match=rf"{MAX_REQUESTS} requests .*r{100 - MAX_REQUESTS}, .*r99$"):
        ids.find_request("busy")
