"""Followers: requests that wait until their leader's prompt is in a decode node's cache.

So a prompt that several requests share is computed once, and a request never waits for a leader
that has ended.

Requests that no present node can hold wait outside the queue, so that they block nobody.
"""

from collections.abc import Iterable, Mapping

from baton.errors import BatonError, DeadlineExceeded, ServiceUnavailable
from baton.types import Incarnation, Request, RequestId
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.settings import QueueLimits
from coordinator.core.placement.node_loads import ContextCapacity
from coordinator.core.requests.record import RequestRecord


class PrefixFollowers:
    def __init__(self, records: Mapping[RequestId, RequestRecord], queue: WaitingQueue) -> None:
        self._records = records
        self._queue = queue
        self._by_leader: dict[RequestId, list[RequestId]] = {}  # by leader

    def add_follower(self, record: RequestRecord, leader: RequestRecord) -> None:
        """Hold `record`, which is queued, until its leader commits, or give it the leader's decode
        node if it has committed. A request for prompt logprobs does not wait, because its prompt
        must be computed."""
        ours, theirs = record.request, leader.request
        if record.awaits_prompt_logprobs or not _can_share_prefix(ours, theirs):
            return
        if leader.attempt is not None and leader.attempt.is_committed:
            record.prefix_holder = leader.attempt.decode
        else:
            self._by_leader.setdefault(theirs.id, []).append(ours.id)
            self._queue.hold_request(ours.id)

    def release_followers(self, leader: RequestId, holder: Incarnation | None) -> bool:
        """Let a leader's followers be placed, on `holder` if given; return whether any waited."""
        waited = False
        for request in self._by_leader.pop(leader, ()):
            follower = self._records.get(request)
            if follower is not None:
                follower.prefix_holder = holder
                self._queue.release_request(request)
                waited = True
        return waited

    def reassign_followers(self, record: RequestRecord) -> None:
        """The request was placed on another node than its prefix holder, which had no room. Let the
        other followers of that holder follow this request, so that the prompt is computed once more
        and not once for each of them."""
        for request in list(self._queue.list_eligible()):
            other = self._records[request]
            if other.prefix_holder == record.prefix_holder and _can_share_prefix(
                other.request, record.request
            ):
                other.prefix_holder = None
                self.add_follower(other, record)


def _can_share_prefix(one: Request, other: Request) -> bool:
    """Return whether the two requests can use the same cached blocks."""
    return (one.prompt_token_ids, one.cache_salt) == (other.prompt_token_ids, other.cache_salt)


_RETRY_AFTER_SECONDS = 1.0  # what the client is told to wait before it tries again


class OversizedRequests:
    """Parks requests that no present node can hold until a larger node joins or they expire.
    Requests that were never placed are bounded, in number and prompt tokens, like the queue; others
    are bounded by what nodes had begun."""

    def __init__(
        self,
        records: Mapping[RequestId, RequestRecord],
        queue: WaitingQueue,
        capacity: ContextCapacity,
        limits: QueueLimits,
    ) -> None:
        self._records = records
        self._queue = queue
        self._capacity = capacity
        self._limits = limits
        self._held: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._held)

    def hold_request(self, record: RequestRecord) -> BatonError | None:
        """Park a request that is too long (see `ContextCapacity`). If too many are parked, return
        the error with which it must end instead."""
        if not record.attempt_count and (why := self._why_full(record)):
            too_long = self._capacity.why_too_long(record)
            return ServiceUnavailable(
                f"{too_long}, and {why} already wait for a larger one",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self._held.add(record.request.id)
        self._queue.park_request(record.request.id)
        return None

    def release_fitting(self) -> None:
        """Return requests to the queue that a node can hold now."""
        for request in self._list_fitting():
            self._held.discard(request)
            self._queue.unpark_request(request)

    def forget_request(self, request: RequestId) -> None:
        """The request has ended. Idempotent."""
        self._held.discard(request)

    def deadline_error(self, record: RequestRecord) -> BatonError:
        """Return the error for a request that has timed out: it is not the client's fault if no
        node could hold the request."""
        given = f"{record.request.timeout_seconds:g} s that its client or --request-timeout gave it"
        if record.request.id in self._held and (why := self._capacity.why_too_long(record)):
            return ServiceUnavailable(
                f"{why}, and no larger one came in the {given}", retry_after=_RETRY_AFTER_SECONDS
            )
        return DeadlineExceeded(f"the request took longer than the {given}")

    def _why_full(self, record: RequestRecord) -> str:
        held = [self._records[request].request for request in self._held]
        if len(held) >= self._limits.max_requests:
            return f"{len(held)} requests (--max-queue)"
        tokens = sum(len(request.prompt_token_ids) for request in held)
        full = held and tokens + len(record.request.prompt_token_ids) > self._limits.max_tokens
        return f"{tokens} prompt tokens (--max-queue-tokens)" if full else ""

    def _list_fitting(self) -> Iterable[RequestId]:
        return [
            request
            for request in self._held
            if not self._capacity.why_too_long(self._records[request])
        ]
