"""Finds requests by the ids that clients know: the id in a response, and their own x-request-id.

Only operators use these ids. No decision depends on them, and several requests may share one.
"""

from collections import OrderedDict

from baton.errors import InvalidRequest, NotFound
from baton.pb import cluster_pb2 as pb
from baton.types import RequestId
from coordinator.core.brain import Brain
from coordinator.explanation_codec import explanation_to_pb

MAX_CLIENT_IDS = 4096  # the most recently used ids
MAX_REQUESTS_PER_ID = 16  # the most recent requests of one id
_BODY_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")


def parse_request_id(name: str) -> RequestId:
    """Return the request id in an id of a response, which may have a prefix."""
    for prefix in _BODY_PREFIXES:
        name = name.removeprefix(prefix)
    return RequestId(name)


class ClientIds:
    """The most recent ids that clients gave their requests, and the requests of each."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, list[RequestId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(self, client_id: str, request: RequestId) -> None:
        requests = self._requests.setdefault(client_id, [])
        requests.append(request)
        del requests[:-MAX_REQUESTS_PER_ID]
        self._requests.move_to_end(client_id)
        if len(self._requests) > MAX_CLIENT_IDS:
            self._requests.popitem(last=False)

    def find_request(self, client_id: str) -> RequestId | None:
        """Return the request with this id, or None.

        Raises InvalidRequest, which lists the requests, if there are several.
        """
        found = self._requests.get(client_id, [])
        if len(found) > 1:
            raise InvalidRequest(
                f"{len(found)} requests came with x-request-id {client_id[:64]!r}, the last "
                f"{MAX_REQUESTS_PER_ID} are known: "
                f"ask for one of {', '.join(found)}",
                param="request_id",
            )
        return found[0] if found else None


def explain_by_name(
    brain: Brain, client_ids: ClientIds, name: str, now: float
) -> pb.ExplainResponse:
    """Explain a request by the id of its response, or by the id that its client gave it.

    Raises NotFound, or InvalidRequest if several requests have that client's id.
    """
    try:
        explanation = brain.explain_request(parse_request_id(name), now)
    except NotFound:
        found = client_ids.find_request(name)
        if found is None:
            raise
        explanation = brain.explain_request(found, now)
    return explanation_to_pb(explanation)
