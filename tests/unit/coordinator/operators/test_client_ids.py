"""The names by which operators find a request: bounded, and never taken for another request."""

import pytest

from baton.errors import InvalidRequest
from baton.types import RequestId
from coordinator.operators.client_ids import (
    MAX_CLIENT_IDS,
    MAX_REQUESTS_PER_ID,
    ClientIds,
    parse_request_id,
)


@pytest.mark.parametrize("name", ["ab12", "cmpl-ab12", "chatcmpl-ab12", "resp_ab12"])
def test_response_body_id_resolves_to_request_id(name: str) -> None:
    assert parse_request_id(name) == "ab12"


def test_client_id_resolves_to_its_request() -> None:
    ids = ClientIds()
    ids.add_request("order 66", RequestId("one"))
    assert ids.find_request("order 66") == "one"
    assert ids.find_request("order 67") is None


def test_ambiguous_client_id_lists_requests() -> None:
    ids = ClientIds()
    for number in range(3):
        ids.add_request("job", RequestId(f"request-{number}"))
    with pytest.raises(
        InvalidRequest, match=r"3 requests .* 'job'.* request-0, request-1, request-2"
    ) as caught:
        ids.find_request("job")
    assert caught.value.param == "request_id"


def test_kept_client_ids_are_bounded() -> None:
    ids = ClientIds()
    for number in range(MAX_CLIENT_IDS + 10):
        ids.add_request(f"id-{number}", RequestId(str(number)))
    assert len(ids) == MAX_CLIENT_IDS
    assert ids.find_request("id-9") is None
    assert ids.find_request("id-10") == "10"
    for number in range(100):
        ids.add_request("busy", RequestId(f"r{number}"))
    with pytest.raises(
        InvalidRequest,
        match=rf"{MAX_REQUESTS_PER_ID} requests .*r{100 - MAX_REQUESTS_PER_ID}, .*r99$",
    ):
        ids.find_request("busy")
