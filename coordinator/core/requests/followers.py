"""Followers: requests that wait until their leader's prompt is in a decode node's cache.

So a prompt that several requests share is computed once, and a request never waits for a leader
that has ended.
"""

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
