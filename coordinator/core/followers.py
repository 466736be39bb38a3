"""Requests that wait in line until another of the same prompt, their leader, has it in a decode node's cache. Nobody
computes a prompt twice that could be computed once, and nobody waits for a leader that is no more."""

from collections.abc import Mapping

from baton.types import Incarnation, Request, RequestId
from coordinator.core.queue import WaitingQueue
from coordinator.core.record import Record


class Followers:
    def __init__(self, records: Mapping[RequestId, Record], queue: WaitingQueue) -> None:
        self._records = records
        self._queue = queue
        self._of: dict[RequestId, list[RequestId]] = {}  # by leader

    def add(self, record: Record, leader: Record) -> None:
        """`record`, which is in the queue, waits there, or is sent to where the prompt is already. One that asks for
        the prompt's scores does not wait: somebody must compute them."""
        ours, theirs = record.request, leader.request
        if record.awaits_scores or not _alike(ours, theirs):
            return
        if leader.attempt is not None and leader.attempt.committed:
            record.holder = leader.attempt.decode
        else:
            self._of.setdefault(theirs.id, []).append(ours.id)
            self._queue.hold(ours.id)

    def release(self, leader: RequestId, holder: Incarnation | None) -> bool:
        """Those that follow wait no more: the prompt is on `holder`, or they are placed like any other. Whether anybody
        waited."""
        waited = False
        for request in self._of.pop(leader, ()):
            follower = self._records.get(request)
            if follower is not None:
                follower.holder = holder
                self._queue.release(request)
                waited = True
        return waited

    def elsewhere(self, record: Record) -> None:
        """`record` is placed, and not on its holder, which has no room. Who was to go there too follows it from now on:
        their prompt comes to one more cache once, and not once for each of them."""
        for request in list(self._queue.offered()):
            other = self._records[request]
            if other.holder == record.holder and _alike(other.request, record.request):
                other.holder = None
                self.add(other, record)


def _alike(one: Request, other: Request) -> bool:
    """What is cached of one is of use to the other."""
    return (one.prompt, one.cache_salt) == (other.prompt, other.cache_salt)
