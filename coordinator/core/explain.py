"""Where one request's time went, told once for good when it ends, or as far as it has come.

What is told holds counts, moments, names of nodes and error messages, and never a word of prompt or answer. It is kept
as bytes: a request that was served at once takes 0.5 KiB with one node of each role and 0.8 KiB with eight, so that
4096 of them take 2 to 3.5 MB; the longest that can be is below 40 KiB, 9 of them the names of 255 other choices.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton import wire
from baton.errors import BatonError
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import AttemptReport, Candidate, ExplainResponse, PromptSources
from baton.pb.common_pb2 import HandoffReport
from baton.types import AttemptKey, FinishReason, RequestId
from coordinator.core.notes import Considered
from coordinator.core.prediction import Prediction
from coordinator.core.record import Attempt, Record
from coordinator.core.sources import split

MAX_AGE = 3600.0  # seconds that an ended request is kept at most
_MAX_REASON = 500  # characters


def explain(record: Record, now: float, result: FinishReason | BatonError | None = None) -> ExplainResponse:
    """`result` is how it ended, None while it runs. Of the others of its answer, only their names."""
    told = ExplainResponse(
        request_id=record.request.id,
        state=record.state.value,
        prompt_tokens=len(record.request.prompt),
        output_tokens=len(record.emitted),
        max_tokens=record.request.sampling.max_tokens,
        timeline=record.marks.timeline(now, record.attempts),
        decode=0.0 if record.marks.first_token is None else now - record.marks.first_token,
        attempts=[_attempt(attempt, record.marks.arrival) for attempt in record.tried],
        attempts_left_out=record.attempts - len(record.tried),
        warm_up=record.internal,
        others=[ExplainResponse(request_id=other) for other in record.others],
    )
    if record.sources is not None:
        told.sources.CopyFrom(PromptSources(**record.sources._asdict()))
        told.sources.received = next((a.admitted.received_tokens for a in record.tried if a.counted and a.admitted), 0)
    if isinstance(result, BatonError):
        told.error.CopyFrom(wire.error_to_pb(result))
    elif result is not None:
        told.finish_reason = wire.FINISH_TO_PB[result]
    return told


def _attempt(attempt: Attempt, arrival: float) -> AttemptReport:
    notes, sources = attempt.notes, split(attempt.ended, attempt.admitted)
    report = AttemptReport(
        number=attempt.key.attempt,
        prefill_node=notes.prefill_node,
        decode_node=notes.decode_node,
        placed=notes.placed - arrival,
        context_tokens=notes.context_tokens,
        ended=notes.ended,
        reason=notes.reason[:_MAX_REASON],
        needed=notes.needed,
        free=notes.free,
        computed_prefill=sources.computed_prefill,
        computed_decode=sources.computed_decode,
        local_cache=sources.local_cache,
        pool=sources.pool,
        remote_pool=sources.remote_pool,
        received=attempt.admitted.received_tokens if attempt.admitted else 0,
        handoff=notes.handoff,
        considered=[_candidate(one) for one in notes.considered],
        predicted=_prediction(notes.prediction),
        way=notes.way.value,
        why=notes.why.value,
        other_way=_prediction(notes.other) if notes.other else None,
        held_back=notes.held_back,
        probe=notes.probe,
    )
    for moment in ("reserved", "prefill_ended", "committed", "over"):
        at = getattr(notes, moment)
        if at is not None:
            setattr(report, moment, at - arrival)
    return report


def _prediction(one: Prediction) -> pb.Prediction:
    return pb.Prediction(
        queue=one.queue,
        prefill=one.prefill,
        transfer=one.transfer,
        step=one.step,
        output_tokens=one.output_tokens,
    )


def _candidate(one: Considered) -> Candidate:
    return Candidate(
        node=one.node,
        role=one.role.value,
        attempts=one.attempts,
        uncomputed_tokens=one.uncomputed_tokens,
        room=max(0, one.room),
        able=one.able,
        chosen=one.chosen,
        held_tokens=one.held_tokens,
        predicted_seconds=one.seconds,
        because=one.because,
    )


@dataclass(slots=True)
class _Kept:
    ended_at: float
    told: bytes


class Explanations:
    """The last `most` ended requests, none older than `MAX_AGE` seconds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[RequestId, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, told: ExplainResponse, now: float) -> None:
        if self.most:
            self._kept[RequestId(told.request_id)] = _Kept(now, told.SerializeToString())
        while self._kept and (len(self._kept) > self.most or self._oldest_end() <= now - MAX_AGE):
            self._kept.popitem(last=False)

    def get(self, request: RequestId, now: float) -> ExplainResponse | None:
        kept = self._kept.get(request)
        return ExplainResponse.FromString(kept.told) if kept and kept.ended_at > now - MAX_AGE else None

    def add_handoff(self, key: AttemptKey, report: HandoffReport) -> None:
        """A report that came after the end, of the attempt that served the request."""
        kept = self._kept.get(key.request)
        if kept is None:
            return
        told = ExplainResponse.FromString(kept.told)
        told.timeline.handoff.CopyFrom(report)
        for attempt in told.attempts:
            if attempt.number == key.attempt:
                attempt.handoff.CopyFrom(report)
        kept.told = told.SerializeToString()

    def _oldest_end(self) -> float:
        return next(iter(self._kept.values())).ended_at
