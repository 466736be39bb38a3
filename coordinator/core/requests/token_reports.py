"""Applies the tokens and prompt logprobs that nodes report to the requests.

Tokens are sent to the client only as far as they continue its output exactly, and only after the
prompt's logprobs if the request asks for those. Whatever else a node sends replaces the attempt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from baton.cluster_link.messages import PromptLogprobsReport, StepTokens
from baton.errors import StaleMessage
from baton.types import FinishReason, Incarnation, TokenEvent, TokenLogprobs
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import (
    EffectLog,
    EmitPromptLogprobs,
    EmitTokens,
    PlacementSignal,
)
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.logprob_checks import (
    collect_prompt_logprobs,
    has_required_logprobs,
    required_top_logprobs,
)
from coordinator.core.requests.record import Attempt, RequestRecord, RequestState
from coordinator.core.requests.table import ProgressClock, RequestTable
from coordinator.core.requests.waiting_requests import WaitingRequests

_key_of = attrgetter("key")


@dataclass(slots=True)
class _AcceptedTokens:
    """The tokens of one sequence in a report that continue its output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: StaleMessage | None = None  # why the tokens after them were not accepted


class TokenReportHandler:
    """Emits tokens to clients, and charges tenants for them."""

    def __init__(
        self,
        registry: NodeRegistry,
        table: RequestTable,
        placement: PlacementServices,
        waiting: WaitingRequests,
        *,
        counters: Counters,
        effects: EffectLog,
        signal: PlacementSignal,
        progress: ProgressClock,
    ) -> None:
        self._registry = registry
        self._table = table
        self._placement = placement
        self._waiting = waiting
        self._counters = counters
        self._effects = effects
        self._signal = signal
        self._progress = progress

    def on_step_tokens(self, sender: Incarnation, message: StepTokens, now: float) -> None:
        """Handle the tokens of one engine step, of all sequences."""
        for draft in message.drafts:  # before the tokens, which may end the request
            found = self._table.find_attempt(draft.key)
            if found is not None and sender in found[1].legs:
                found[1].trace.add_draft(draft.num_tokens, draft.num_accepted)
        for key, events in groupby(message.events, key=_key_of):
            found = self._table.find_attempt_of_sender(key, sender)
            if found is not None:
                self._accept_tokens(*found, sender, list(events), now)

    def on_prompt_logprobs(
        self, sender: Incarnation, message: PromptLogprobsReport, now: float
    ) -> None:
        """Handle logprobs of the prompt; tokens that wait for the last of them are emitted."""
        found = self._table.find_attempt_of_sender(message.key, sender)
        if found is None:
            return
        record, attempt = found
        if sender != attempt.computing_node or not record.awaits_prompt_logprobs:
            self._counters.dropped_messages["unexpected"] += 1
            return
        try:
            collect_prompt_logprobs(record, attempt, message, self._vocab_size)
        except StaleMessage as error:
            self._table.replace_attempt(record, error, now)
            return
        self._placement.loads.acknowledge_leg(sender, message.key)
        self._progress.record_progress(now)
        if attempt.is_committed:
            self._table.commit_attempt(record, attempt)
        if (
            attempt.buffered_tokens
            and attempt.decode is not None
            and not record.awaits_prompt_logprobs
        ):
            buffered, attempt.buffered_tokens = attempt.buffered_tokens, []
            self._accept_tokens(record, attempt, attempt.decode, buffered, now)

    def missing_logprobs_error(self, record: RequestRecord, attempt: Attempt) -> StaleMessage:
        """Return the error of a node that has computed the prompt without all of its logprobs."""
        name = self._registry.name_of(attempt.computing_node)
        received = len(attempt.prompt_logprobs)
        expected = len(record.request.prompt_token_ids) - 1
        return StaleMessage(
            f"node {name} has computed the prompt and sent {received} of its {expected} logprobs"
        )

    def _accept_tokens(
        self,
        record: RequestRecord,
        attempt: Attempt,
        sender: Incarnation,
        events: Sequence[TokenEvent],
        now: float,
    ) -> None:
        """Emit one sequence's tokens of a report, as far as they continue the output exactly."""
        if record.awaits_prompt_logprobs:
            self._buffer_tokens(record, attempt, sender, events, now)
            return
        accepted = self._check_events(record, attempt, sender, events)
        if accepted.token_ids:
            if record.state is not RequestState.STREAMING:
                self._placement.loads.acknowledge_leg(sender, attempt.key, computed=True, now=now)
                self._signal.request_pass()
            if sender == attempt.decode and not attempt.is_committed:
                self._table.commit_attempt(record, attempt)
            self._emit_tokens(record, attempt, accepted, now)
        if accepted.finish_reason is not None:
            self._table.close_leg(attempt, sender)
            self._table.end_request(record, accepted.finish_reason, now)
        elif accepted.error is not None:
            self._table.replace_attempt(record, accepted.error, now)

    def _check_events(
        self,
        record: RequestRecord,
        attempt: Attempt,
        sender: Incarnation,
        events: Sequence[TokenEvent],
    ) -> _AcceptedTokens:
        sampling, accepted = record.request.sampling, _AcceptedTokens()
        top_logprobs = required_top_logprobs(sampling.logprobs, self._vocab_size)
        for event in events:
            expected = len(record.emitted_token_ids) + len(accepted.token_ids)
            if accepted.finish_reason is not None or event.output_index != expected:
                accepted.error = StaleMessage(
                    f"node {self._registry.name_of(sender)} sent token {event.output_index},"
                    f" expected was {expected}"
                )
                break
            if sender == attempt.prefill and event.finish_reason is None:
                accepted.error = StaleMessage(
                    f"prefill node {self._registry.name_of(sender)} sent a token that does not end"
                    " the output"
                )
                break
            if top_logprobs is not None:
                if event.logprobs is None or not has_required_logprobs(
                    event.logprobs, top_logprobs
                ):
                    accepted.error = StaleMessage(
                        f"node {self._registry.name_of(sender)} sent token {event.output_index}"
                        " without its logprobs"
                    )
                    break
                accepted.logprobs.append(event.logprobs)
            accepted.token_ids.append(event.token_id)
            accepted.finish_reason = event.finish_reason
            if event.finish_reason is None and expected + 1 >= sampling.max_tokens:
                accepted.finish_reason = FinishReason.LENGTH
        return accepted

    def _emit_tokens(
        self, record: RequestRecord, attempt: Attempt, accepted: _AcceptedTokens, now: float
    ) -> None:
        """Send the next output tokens to the client and charge the tenant for them."""
        request, count = record.request, len(accepted.token_ids)
        if record.state is not RequestState.STREAMING:
            self._start_streaming(record, attempt, now)
        record.emitted_token_ids += accepted.token_ids
        self._waiting.queue.charge_output(request.id, count, now)
        self._placement.admission.charge_tokens(request.principal.tenant, count, now)
        self._counters.generated_tokens += 0 if record.is_internal else count
        self._progress.record_progress(now)
        self._effects.append_effect(
            EmitTokens(request.id, tuple(accepted.token_ids), tuple(accepted.logprobs))
        )

    def _start_streaming(self, record: RequestRecord, attempt: Attempt, now: float) -> None:
        """The first token of an attempt has come."""
        if not record.emitted_token_ids and record.prompt_logprobs is not None:
            if record.request.sampling.prompt_logprobs is not None:
                self._effects.append_effect(
                    EmitPromptLogprobs(record.request.id, record.prompt_logprobs)
                )
            record.prompt_logprobs = ()
        record.set_state(RequestState.STREAMING)
        record.timestamps.mark_moment("first_token", now)
        self._placement.state.record_first_token(
            attempt.trace.prediction, now - attempt.trace.placed
        )
        attempt.reserve_deadline = None
        record.prefill_charged_class = ""

    def _buffer_tokens(
        self,
        record: RequestRecord,
        attempt: Attempt,
        sender: Incarnation,
        events: Sequence[TokenEvent],
        now: float,
    ) -> None:
        """Keep decode's tokens until prefill has sent the logprobs of the whole prompt."""
        attempt.buffered_tokens += events
        if (
            sender == attempt.computing_node
            or len(attempt.buffered_tokens) > record.remaining_tokens
        ):
            self._table.replace_attempt(record, self.missing_logprobs_error(record, attempt), now)
            return
        self._placement.loads.acknowledge_leg(sender, attempt.key, computed=True, now=now)
        self._table.commit_attempt(record, attempt)
        self._progress.record_progress(now)

    @property
    def _vocab_size(self) -> int:
        model = self._registry.model_identity
        return model.vocab_size if model is not None else 0
