"""Requests that wait in line until another of the same prompt, their leader, has it in a decode
node's cache. Nobody computes a prompt twice that could be computed once, and nobody waits for a
leader that is no more."""

from collections.abc import Mapping

from baton.types import Incarnation, Request, RequestId
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.requests.record import RequestRecord


class PrefixFollowers:
    def __init__(self, records: Mapping[RequestId, RequestRecord], queue: WaitingQueue) -> None:
        self._records = records
        self._queue = queue
        self._by_leader: dict[RequestId, list[RequestId]] = {}  # by leader

    def add_follower(self, record: RequestRecord, leader: RequestRecord) -> None:
        """`record`, which is in the queue, waits there, or is sent to where the prompt is already.
        One that asks for the prompt's scores does not wait: somebody must compute them."""
        ours, theirs = record.request, leader.request
        if record.awaits_prompt_logprobs or not _can_share_prefix(ours, theirs):
            return
        if leader.attempt is not None and leader.attempt.is_committed:
            record.prefix_holder = leader.attempt.decode
        else:
            self._by_leader.setdefault(theirs.id, []).append(ours.id)
            self._queue.hold_request(ours.id)

    def release_followers(self, leader: RequestId, holder: Incarnation | None) -> bool:
        """Those that follow wait no more: the prompt is on `holder`, or they are placed like any
        other. Whether anybody waited."""
        waited = False
        for request in self._by_leader.pop(leader, ()):
            follower = self._records.get(request)
            if follower is not None:
                follower.prefix_holder = holder
                self._queue.release_request(request)
                waited = True
        return waited

    def reassign_followers(self, record: RequestRecord) -> None:
        """`record` is placed, and not on its holder, which has no room. Who was to go there too
        follows it from now on: their prompt comes to one more cache once, and not once for each of
        them."""
        for request in list(self._queue.list_eligible()):
            other = self._records[request]
            if other.prefix_holder == record.prefix_holder and _can_share_prefix(
                other.request, record.request
            ):
                other.prefix_holder = None
                self.add_follower(other, record)


def _can_share_prefix(one: Request, other: Request) -> bool:
    """What is cached of one is of use to the other."""
    return (one.prompt_token_ids, one.cache_salt) == (other.prompt_token_ids, other.cache_salt)
