"""Converts domain types to protobuf and back.

No other code reads fields of the messages that carry these types.
"""

import math

from baton.cluster_link.report_types import HandoffReport, LedgerOwner, MemberLedger
from baton.errors import BatonError, error_from_code
from baton.kv.blocks import KVLayout
from baton.kv.pool_types import RemotePrefix
from baton.pb import cluster_pb2, common_pb2
from baton.types import (
    AttemptKey,
    AttemptSpec,
    FinishReason,
    Incarnation,
    NodeName,
    PeerAddress,
    Principal,
    Request,
    RequestId,
    SamplingParams,
    SegmentRef,
    Ticket,
    TicketId,
    TokenEvent,
    TokenLogprobs,
)

LEDGER_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
FINISH_REASON_TO_PB = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
FINISH_REASON_FROM_PB: dict[int, FinishReason] = {
    value: key for key, value in FINISH_REASON_TO_PB.items()
}


def attempt_key_to_pb(key: AttemptKey) -> cluster_pb2.AttemptKey:
    return cluster_pb2.AttemptKey(
        request_id=key.request_id, attempt=key.attempt_number, choice=key.choice_index
    )


def attempt_key_from_pb(message: cluster_pb2.AttemptKey) -> AttemptKey:
    return AttemptKey(RequestId(message.request_id), message.attempt, message.choice)


def error_to_pb(error: BatonError) -> common_pb2.Error:
    return common_pb2.Error(code=error.code, message=error.message, param=error.param or "")


def error_from_pb(message: common_pb2.Error) -> BatonError:
    return error_from_code(message.code, message.message, message.param or None)


def layout_to_pb(layout: KVLayout) -> cluster_pb2.Layout:
    return cluster_pb2.Layout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )


def layout_from_pb(message: cluster_pb2.Layout) -> KVLayout:
    return KVLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
    )


def _sampling_to_pb(params: SamplingParams) -> cluster_pb2.Sampling:
    return cluster_pb2.Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=[
            cluster_pb2.LogitBias(token=token, bias=bias) for token, bias in params.logit_bias
        ],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _sampling_from_pb(params: cluster_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in params.logit_bias),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def attempt_spec_to_pb(spec: AttemptSpec) -> cluster_pb2.Work:
    return cluster_pb2.Work(
        key=attempt_key_to_pb(spec.key),
        prompt=common_pb2.TokenIds(ids=spec.request.prompt_token_ids),
        emitted=common_pb2.TokenIds(ids=spec.emitted_token_ids),
        sampling=_sampling_to_pb(spec.request.sampling),
        timeout_seconds=spec.request.timeout_seconds,
        cache_salt=spec.request.cache_salt,
        tenant_class=spec.request.principal.tenant_class,
        level=spec.request.principal.priority_level,
        prefill_payer=spec.prefill_charged_class,
        model=spec.identity_digest,
    )


def attempt_spec_from_pb(message: cluster_pb2.Work) -> AttemptSpec:
    key = attempt_key_from_pb(message.key)
    request = Request(
        id=key.request_id,
        prompt_token_ids=tuple(message.prompt.ids),
        sampling=_sampling_from_pb(message.sampling),
        timeout_seconds=message.timeout_seconds,
        cache_salt=message.cache_salt,
        choice_index=key.choice_index,
        principal=Principal(tenant_class=message.tenant_class, priority_level=message.level),
    )
    return AttemptSpec(
        key, request, tuple(message.emitted.ids), message.prefill_payer, message.model
    )


def peer_to_pb(peer: PeerAddress) -> cluster_pb2.Peer:
    return cluster_pb2.Peer(
        name=peer.name,
        incarnation=peer.incarnation,
        host_id=peer.host_id,
        transfer_endpoint=peer.transfer_endpoint,
    )


def peer_from_pb(message: cluster_pb2.Peer) -> PeerAddress:
    return PeerAddress(
        name=NodeName(message.name),
        incarnation=Incarnation(message.incarnation),
        host_id=message.host_id,
        transfer_endpoint=message.transfer_endpoint,
    )


def remote_prefix_to_pb(prefix: RemotePrefix | None) -> cluster_pb2.Elsewhere | None:
    if prefix is None:
        return None
    pool = peer_to_pb(prefix.pool)
    return cluster_pb2.Elsewhere(
        pool=pool, tokens=prefix.prefix_tokens, token_seconds=prefix.compute_seconds_per_token
    )


def remote_prefix_from_pb(message: cluster_pb2.Elsewhere) -> RemotePrefix:
    return RemotePrefix(peer_from_pb(message.pool), message.tokens, max(0.0, message.token_seconds))


def ticket_to_pb(ticket: Ticket) -> cluster_pb2.Ticket:
    return cluster_pb2.Ticket(
        id=ticket.id,
        key=attempt_key_to_pb(ticket.key),
        decode=peer_to_pb(ticket.decode_peer),
        writer=ticket.writer_incarnation,
        first_block=ticket.first_block,
        offsets=ticket.block_offsets,
        num_tokens=ticket.num_tokens,
        ttl_seconds=ticket.ttl_seconds,
        transport=ticket.transport,
        segment=ticket.segment.name,
        fence=ticket.fence_byte,
    )


def ticket_from_pb(message: cluster_pb2.Ticket) -> Ticket:
    decode = peer_from_pb(message.decode)
    return Ticket(
        id=TicketId(message.id),
        key=attempt_key_from_pb(message.key),
        decode_peer=decode,
        writer_incarnation=Incarnation(message.writer),
        first_block=message.first_block,
        block_offsets=tuple(message.offsets),
        num_tokens=message.num_tokens,
        ttl_seconds=message.ttl_seconds,
        transport=message.transport,
        segment=SegmentRef(message.segment, decode.incarnation),
        fence_byte=message.fence,
    )


def token_event_to_pb(event: TokenEvent) -> cluster_pb2.Token:
    finish = (
        FINISH_REASON_TO_PB[event.finish_reason]
        if event.finish_reason
        else common_pb2.FINISH_REASON_UNSPECIFIED
    )
    return cluster_pb2.Token(
        key=attempt_key_to_pb(event.key),
        index=event.output_index,
        token=event.token_id,
        finish=finish,
        score=logprobs_to_pb(event.logprobs) if event.logprobs else None,
    )


def token_event_from_pb(message: cluster_pb2.Token) -> TokenEvent:
    return TokenEvent(
        key=attempt_key_from_pb(message.key),
        output_index=message.index,
        token_id=message.token,
        finish_reason=FINISH_REASON_FROM_PB.get(message.finish),
        logprobs=logprobs_from_pb(message.score) if message.HasField("score") else None,
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> common_pb2.Score:
    return common_pb2.Score(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top_logprobs],
        top_logprobs=[logprob for _, logprob in logprobs.top_logprobs],
    )


def logprobs_from_pb(message: common_pb2.Score) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    )


def handoff_report_to_pb(report: HandoffReport) -> common_pb2.HandoffReport:
    return common_pb2.HandoffReport(
        transport=report.transport,
        bytes=report.bytes,
        slabs=report.slabs,
        slabs_landed_before_last_layer=report.slabs_landed_before_last_layer,
        compute_seconds=report.compute_seconds,
        exposed_seconds=report.exposed_seconds,
        commit_seconds=report.commit_seconds,
        computed_tokens=report.computed_tokens,
        cached_tokens=report.cached_tokens,
    )


def handoff_report_from_pb(message: common_pb2.HandoffReport) -> HandoffReport:
    return HandoffReport(
        transport=message.transport,
        bytes=message.bytes,
        slabs=message.slabs,
        slabs_landed_before_last_layer=message.slabs_landed_before_last_layer,
        compute_seconds=check_seconds(message.compute_seconds),
        exposed_seconds=check_seconds(message.exposed_seconds),
        commit_seconds=check_seconds(message.commit_seconds),
        computed_tokens=message.computed_tokens,
        cached_tokens=message.cached_tokens,
    )


def ledger_to_pb(ledger: MemberLedger) -> common_pb2.Ledger:
    return common_pb2.Ledger(
        node=ledger.name,
        incarnation=ledger.incarnation,
        total=ledger.num_blocks,
        owners=[
            common_pb2.LedgerOwner(
                owner=entry.owner,
                state=entry.state,
                blocks=entry.num_blocks,
                age_seconds=entry.age_seconds,
            )
            for entry in ledger.owners
        ],
        **ledger.counts,
    )


def ledger_from_pb(message: common_pb2.Ledger) -> MemberLedger:
    owners = (
        LedgerOwner(entry.owner, entry.state, entry.blocks, check_seconds(entry.age_seconds))
        for entry in message.owners
    )
    return MemberLedger(
        name=message.node,
        incarnation=Incarnation(message.incarnation),
        num_blocks=message.total,
        counts={state: getattr(message, state) for state in LEDGER_STATES},
        owners=tuple(owners),
    )


def check_seconds(seconds: float) -> float:
    """Raise ValueError unless it is a duration: finite and not negative."""
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"a duration is {seconds:g} s: it must be finite and at least 0")
    return seconds
