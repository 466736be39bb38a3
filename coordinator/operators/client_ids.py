"""The names by which clients know their requests: the id in an answer's body, and the x-request-id
that they sent.

They are for operators who ask about a request, and for nothing else: no decision looks at them, and
several requests may have one of them.
"""

from collections import OrderedDict

from baton.errors import InvalidRequest
from baton.types import RequestId

MAX_CLIENT_IDS = 4096  # those used last
MAX_REQUESTS_PER_ID = 16  # of one client id, the last ones
_BODY_PREFIXES = ("chatcmpl-", "cmpl-")


def parse_request_id(name: str) -> RequestId:
    """Of an id as it stands in an answer's body, or as it is without its prefix."""
    for prefix in _BODY_PREFIXES:
        name = name.removeprefix(prefix)
    return RequestId(name)


class ClientIds:
    """The last `MAX_CLIENT_IDS` ids that clients gave their requests, each with its last
    `MAX_REQUESTS_PER_ID` requests."""

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
        """The one request of this id, None if there is none. Raises InvalidRequest naming them if
        there are several."""
        found = self._requests.get(client_id, [])
        if len(found) > 1:
            raise InvalidRequest(
                f"{len(found)} requests came with x-request-id {client_id[:64]!r}, the last "
                f"{MAX_REQUESTS_PER_ID} are known: "
                f"ask for one of {', '.join(found)}",
                param="request_id",
            )
        return found[0] if found else None
