"""Where a request's time went, on the coordinator's clock.

The time to the first token is cut at four moments, each no earlier than the one before and no later
than the first token, so that the stages are a partition of it whatever arrives, in whatever order,
or never:

    moment   arrival     placed        reserved      prefill_ended      committed          token
    stage          queue       reserve        prefill           transfer      first_token

`placed` is the last placement before the first token. Prefill computes while decode reserves, and
layers travel while prefill computes: a stage is the part that was exposed. `committed` is when the
coordinator first hears of the commit, from either node. Where decode computes the prompt itself
there is no transfer, and `prefill` lasts until the token.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.pb.common_pb2 import HandoffReport, Timeline
from baton.types import AttemptKey, NodeName, RequestId

MAX_TIMELINES = 4096  # timelines of ended requests


@dataclass(slots=True)
class Timestamps:
    """Moments of one request; None has not happened in its last attempt."""

    arrival: float
    placed: float | None = None
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    first_token: float | None = None
    prefill_node: NodeName | None = None
    decode_node: NodeName | None = None
    handoff_report: HandoffReport | None = None
    models: list[str] = field(
        default_factory=list
    )  # of the nodes that it was placed on, by their own word, each once

    def mark_placed(
        self, now: float, prefill: NodeName, decode: NodeName, models: Iterable[str] = ()
    ) -> None:
        """Start a new attempt; earlier attempts without a token count as queueing."""
        self.prefill_node, self.decode_node = prefill, decode
        self.models += [model for model in dict.fromkeys(models) if model not in self.models]
        if self.first_token is None:
            self.placed, self.reserved, self.prefill_ended, self.committed, self.handoff_report = (
                now,
                None,
                None,
                None,
                None,
            )

    def mark_moment(self, moment: str, now: float) -> None:
        """Set the moment if it is not set and no token has been emitted."""
        if self.first_token is None and getattr(self, moment) is None:
            setattr(self, moment, now)

    def mark_handoff_skipped(self) -> None:
        """Decode computes the rest of the prompt itself, so there is no transfer."""
        if self.first_token is None:
            self.prefill_ended = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    def build_timeline(self, now: float, attempts: int) -> Timeline:
        end = now if self.first_token is None else self.first_token
        placed = end if self.placed is None else self.placed
        ended = end if self.prefill_ended is None else self.prefill_ended
        edges = [self.arrival]
        for moment in (placed, self.reserved, ended, self.committed, end):
            edges.append(edges[-1] if moment is None else min(max(moment, edges[-1]), end))
        queue, reserve, prefill, transfer, first_token = (edges[i + 1] - edges[i] for i in range(5))
        return Timeline(
            queue=queue,
            reserve=reserve,
            prefill=prefill,
            transfer=transfer,
            first_token=first_token,
            ttft=queue + reserve + prefill + transfer + first_token,
            total=now - self.arrival,
            attempts=attempts,
            prefill_node=self.prefill_node or "",
            decode_node=self.decode_node or "",
            handoff=self.handoff_report,
            models=self.models,
        )


class TimelineStore:
    """The timelines of the last requests that have ended."""

    def __init__(self, kept: int = MAX_TIMELINES) -> None:
        self._max_kept = kept
        self._timelines: OrderedDict[RequestId, Timeline] = OrderedDict()

    def add_timeline(self, request: RequestId, timeline: Timeline) -> None:
        self._timelines[request] = timeline
        if len(self._timelines) > self._max_kept:
            self._timelines.popitem(last=False)

    def add_handoff_report(self, key: AttemptKey, report: HandoffReport) -> bool:
        """Add a report that arrived after the end; return whether it was the missing one."""
        timeline = self._timelines.get(key.request_id)
        if (
            timeline is None
            or timeline.attempts != key.attempt_number
            or timeline.HasField("handoff")
        ):
            return False
        timeline.handoff.CopyFrom(report)
        return True

    def get(self, request: RequestId) -> Timeline | None:
        return self._timelines.get(request)
