"""How requests wait for their next attempt.

Most wait in the fair queue. `PrefixFollowers` keep their place in it, but are no candidates until
the prompt that they share with their leader is in a decode node's cache: so a shared prompt is
computed once. `OversizedRequests`, which no present node can hold, wait outside the queue and block
nobody. `RetryScheduler` holds requests that back off after repeated failures, or that the retry
budget holds back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineExceeded, ServiceUnavailable
from baton.types import Incarnation, Request, RequestId
from coordinator.core.admission.admission_controller import RetryBudget
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.effects import RequestTimers
from coordinator.core.common.settings import QueueLimits, retry_backoff_seconds
from coordinator.core.membership.node_registry import ContextCapacity
from coordinator.core.requests.record import RequestRecord


class PrefixFollowers:
    """Holds requests back until a request with the same prompt has been computed."""

    def __init__(self, records: Mapping[RequestId, RequestRecord], queue: WaitingQueue) -> None:
        self._records = records
        self._queue = queue
        self._by_leader: dict[RequestId, list[RequestId]] = {}  # followers of each leader, in order

    def add_follower(self, record: RequestRecord, leader: RequestRecord) -> None:
        """Hold `record`, which is queued, until its leader commits, or give it the leader's decode
        node if it has committed. A request for prompt logprobs does not wait, because its prompt
        must be computed."""
        request, leading = record.request, leader.request
        if record.awaits_prompt_logprobs or not _can_share_prefix(request, leading):
            return
        if leader.attempt is not None and leader.attempt.is_committed:
            record.prefix_holder = leader.attempt.decode
        else:
            self._by_leader.setdefault(leading.id, []).append(request.id)
            self._queue.hold_request(request.id)

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


_RETRY_AFTER_SECONDS = 1.0  # seconds after which the client may retry


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
        self.held: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self.held)

    def hold_request(self, record: RequestRecord) -> BatonError | None:
        """Park a request that is too long (see `ContextCapacity`). If too many are parked, return
        the error with which it must end instead."""
        if not record.attempt_count and (why := self._why_full(record)):
            too_long = self._capacity.why_too_long(record)
            return ServiceUnavailable(
                f"{too_long}, and {why} already wait for a larger one",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self.held.add(record.request.id)
        self._queue.park_request(record.request.id)
        return None

    def release_fitting(self) -> None:
        """Return requests to the queue that a node can hold now."""
        for request in self._list_fitting():
            self.held.discard(request)
            self._queue.unpark_request(request)

    def forget_request(self, request: RequestId) -> None:
        """The request has ended. Idempotent."""
        self.held.discard(request)

    def deadline_error(self, record: RequestRecord) -> BatonError:
        """Return the error for a request that has timed out: it is not the client's fault if no
        node could hold the request."""
        given = f"{record.request.timeout_seconds:g} s that its client or --request-timeout gave it"
        if record.request.id in self.held and (why := self._capacity.why_too_long(record)):
            return ServiceUnavailable(
                f"{why}, and no larger one came in the {given}", retry_after=_RETRY_AFTER_SECONDS
            )
        return DeadlineExceeded(f"the request took longer than the {given}")

    def _why_full(self, record: RequestRecord) -> str:
        held = [self._records[request].request for request in self.held]
        if len(held) >= self._limits.max_requests:
            return f"{len(held)} requests (--max-queue)"
        tokens = sum(len(request.prompt_token_ids) for request in held)
        full = held and tokens + len(record.request.prompt_token_ids) > self._limits.max_tokens
        return f"{tokens} prompt tokens (--max-queue-tokens)" if full else ""

    def _list_fitting(self) -> Iterable[RequestId]:
        return [
            request
            for request in self.held
            if not self._capacity.why_too_long(self._records[request])
        ]


class RetryScheduler:
    """Holds back failed requests until the retry budget lets them enter the queue again.

    At most `max_held` requests are held back; they are released in order of failure, as the budget
    allows. Methods return whether a request has entered the queue.
    """

    def __init__(
        self,
        records: Mapping[RequestId, RequestRecord],
        queue: WaitingQueue,
        timers: RequestTimers,
        budget: RetryBudget,
        max_held: int,
    ) -> None:
        self.budget = budget
        self.held_back_total = 0  # ever
        self._records = records
        self._queue = queue
        self._timers = timers
        self._max_held = max_held
        self._backing_off: set[RequestId] = set()
        self.held_back_since: dict[RequestId, float] = {}  # when each began to wait

    def __len__(self) -> int:
        return len(self._backing_off) + len(self.held_back_since)

    @property
    def held_back_count(self) -> int:
        return len(self.held_back_since)

    def has_room_for_retry(self, now: float) -> bool:
        """Return whether one more retry that is not exempt can be accepted."""
        return len(self.held_back_since) < self._max_held or self.budget.available_retries(now) > 0

    def schedule_retry(
        self, record: RequestRecord, backoff_seconds: float, now: float, *, exempt: bool
    ) -> bool:
        """Queue the request again after `backoff_seconds`, or when the budget allows."""
        if exempt or self.budget.try_spend(now):
            return self._start_backoff(record, backoff_seconds, now)
        self.held_back_total += 1
        self.held_back_since[record.request.id] = now
        return False

    def release_within_budget(self, now: float) -> bool:
        """Release held-back requests as far as the budget allows now."""
        released: list[RequestId] = []
        for request in self.held_back_since:
            if not self.budget.try_spend(now):
                break
            released.append(request)
        return self._release_requests(released, now)

    def on_node_lost(self, node: Incarnation, now: float) -> bool:
        """Release requests that failed on a node that was found to be lost."""
        return self._release_requests(
            [
                request
                for request in self.held_back_since
                if node in self._records[request].avoided_nodes
            ],
            now,
        )

    def on_backoff_elapsed(self, record: RequestRecord) -> bool:
        record.retry_at = None
        self._backing_off.remove(record.request.id)
        self._queue.add_request_front(record.request.id)
        return True

    def forget_request(self, request: RequestId) -> None:
        """The request has ended. Idempotent."""
        self._backing_off.discard(request)
        self.held_back_since.pop(request, None)

    def _release_requests(self, requests: list[RequestId], now: float) -> bool:
        queued = False
        for request in reversed(
            requests
        ):  # so that the first of them ends at the head of the queue
            record = self._records[request]
            record.held_back_seconds += now - self.held_back_since.pop(request)
            queued |= self._start_backoff(record, retry_backoff_seconds(record.failure_count), now)
        return queued

    def _start_backoff(self, record: RequestRecord, backoff_seconds: float, now: float) -> bool:
        if not backoff_seconds:
            self._queue.add_request_front(record.request.id)
            return True
        record.retry_at = now + backoff_seconds
        self._backing_off.add(record.request.id)
        self._timers.set_timer(record.request.id, record.next_timer_at())
        return False


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """All requests that wait for an attempt, by the way in which they wait."""

    queue: WaitingQueue
    followers: PrefixFollowers
    oversized: OversizedRequests
    retries: RetryScheduler

    @property
    def request_count(self) -> int:
        return len(self.queue) + len(self.oversized) + len(self.retries)

    def forget_request(self, request: RequestId) -> bool:
        """The request has ended. Return whether followers that waited for it are released."""
        self.queue.remove_request(request)
        self.oversized.forget_request(request)
        self.retries.forget_request(request)
        return self.followers.release_followers(request, None)
