"""Orders of the node link to protobuf and back, with the attempts, peers and tickets in them."""

from typing import assert_never

from baton.cluster_link.messages import (
    ArmFailpoints,
    CacheSnapshotRequest,
    CancelOrder,
    DecodeOrder,
    JoinRefusal,
    LedgerQuery,
    LinkControl,
    NodeOrder,
    PeerLostNotice,
    Ping,
    PrefillOrder,
    SetRoleOrder,
    TicketOrder,
    Welcome,
)
from baton.cluster_link.pb_conversion import error_from_pb, error_to_pb
from baton.kv.pool_types import RemotePrefix
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from baton.types import (
    AttemptKey,
    AttemptSpec,
    GrammarKind,
    Incarnation,
    NodeName,
    PeerAddress,
    Principal,
    Request,
    RequestId,
    Role,
    SamplingParams,
    SegmentRef,
    StructuredOutput,
    Ticket,
    TicketId,
)


def encode_order(order: NodeOrder | LinkControl) -> pb.CoordinatorMessage:
    match order:
        case DecodeOrder(spec, writer, share, remote_prefix):
            submit = pb.Submit(
                work=attempt_spec_to_pb(spec),
                writer=peer_to_pb(writer) if writer else None,
                prefill_share=share,
                elsewhere=remote_prefix_to_pb(remote_prefix),
            )
            return pb.CoordinatorMessage(submit=submit)
        case PrefillOrder(spec, needs_no_decode, remote_prefix):
            prefill = pb.Prefill(
                work=attempt_spec_to_pb(spec),
                alone=needs_no_decode,
                elsewhere=remote_prefix_to_pb(remote_prefix),
            )
            return pb.CoordinatorMessage(prefill=prefill)
        case TicketOrder(ticket):
            return pb.CoordinatorMessage(ticket=pb.GiveTicket(ticket=ticket_to_pb(ticket)))
        case CancelOrder(key, reason):
            cancel = pb.Cancel(key=attempt_key_to_pb(key), reason=error_to_pb(reason))
            return pb.CoordinatorMessage(cancel=cancel)
        case PeerLostNotice(incarnation):
            return pb.CoordinatorMessage(peer_gone=pb.PeerGone(incarnation=incarnation))
        case LedgerQuery(query_id):
            return pb.CoordinatorMessage(ledger_query=pb.LedgerQuery(query=query_id))
        case CacheSnapshotRequest():
            return pb.CoordinatorMessage(cache_query=pb.CacheQuery())
        case SetRoleOrder(role):
            return pb.CoordinatorMessage(set_role=pb.SetRole(role=role.value))
        case Welcome() | JoinRefusal() | Ping() | ArmFailpoints():
            return _encode_control(order)
        case _:
            assert_never(order)


def _encode_control(message: LinkControl) -> pb.CoordinatorMessage:
    match message:
        case Welcome(incarnation, heartbeat, silence):
            welcome = pb.Welcome(
                incarnation=incarnation, heartbeat_seconds=heartbeat, silence_seconds=silence
            )
            return pb.CoordinatorMessage(welcome=welcome)
        case JoinRefusal(error, retry):
            refusal = pb.Refusal(error=error_to_pb(error), retry_seconds=retry)
            return pb.CoordinatorMessage(refusal=refusal)
        case Ping():
            return pb.CoordinatorMessage(ping=pb.Ping())
        case ArmFailpoints(spec):
            return pb.CoordinatorMessage(arm=pb.Arm(spec=spec))
        case _:
            assert_never(message)


def decode_order(message: pb.CoordinatorMessage) -> NodeOrder | LinkControl | None:
    """The order in `message`; None if there is none that this version knows.

    Raises ValueError if a field is out of its bounds.
    """
    match message.WhichOneof("message"):
        case "submit":
            submit = message.submit
            return DecodeOrder(
                attempt_spec_from_pb(submit.work),
                peer_from_pb(submit.writer) if submit.HasField("writer") else None,
                max(0.0, submit.prefill_share),
                _decode_remote_prefix(submit),
            )
        case "prefill":
            return PrefillOrder(
                attempt_spec_from_pb(message.prefill.work),
                message.prefill.alone,
                _decode_remote_prefix(message.prefill),
            )
        case "ticket":
            return TicketOrder(ticket_from_pb(message.ticket.ticket))
        case "cancel":
            return CancelOrder(
                attempt_key_from_pb(message.cancel.key),
                error_from_pb(message.cancel.reason),
            )
        case "peer_gone":
            return PeerLostNotice(Incarnation(message.peer_gone.incarnation))
        case "ledger_query":
            return LedgerQuery(message.ledger_query.query)
        case "cache_query":
            return CacheSnapshotRequest()
        case "set_role":
            return SetRoleOrder(Role(message.set_role.role))
        case _:
            return _decode_control(message)


def _decode_control(message: pb.CoordinatorMessage) -> LinkControl | None:
    match message.WhichOneof("message"):
        case "welcome":
            welcome = message.welcome
            return Welcome(
                Incarnation(welcome.incarnation), welcome.heartbeat_seconds, welcome.silence_seconds
            )
        case "refusal":
            refusal = message.refusal
            return JoinRefusal(error_from_pb(refusal.error), refusal.retry_seconds)
        case "ping":
            return Ping()
        case "arm":
            return ArmFailpoints(message.arm.spec)
        case _:
            return None


def _decode_remote_prefix(message: pb.Submit | pb.Prefill) -> RemotePrefix | None:
    return remote_prefix_from_pb(message.elsewhere) if message.HasField("elsewhere") else None


def attempt_key_to_pb(key: AttemptKey) -> pb.AttemptKey:
    return pb.AttemptKey(
        request_id=key.request_id, attempt=key.attempt_number, choice=key.choice_index
    )


def attempt_key_from_pb(message: pb.AttemptKey) -> AttemptKey:
    return AttemptKey(RequestId(message.request_id), message.attempt, message.choice)


def _sampling_to_pb(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
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
        logit_bias=[pb.LogitBias(token=token, bias=bias) for token, bias in params.logit_bias],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        structured_output=_grammar_to_pb(params.structured_output),
    )


def _sampling_from_pb(params: pb.Sampling) -> SamplingParams:
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
        structured_output=(
            StructuredOutput(
                GrammarKind(params.structured_output.kind), params.structured_output.text
            )
            if params.HasField("structured_output")
            else None
        ),
    )


def _grammar_to_pb(grammar: StructuredOutput | None) -> pb.Grammar | None:
    return None if grammar is None else pb.Grammar(kind=grammar.kind.value, text=grammar.text)


def attempt_spec_to_pb(spec: AttemptSpec) -> pb.Work:
    return pb.Work(
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


def attempt_spec_from_pb(message: pb.Work) -> AttemptSpec:
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


def peer_to_pb(peer: PeerAddress) -> pb.Peer:
    return pb.Peer(
        name=peer.name,
        incarnation=peer.incarnation,
        host_id=peer.host_id,
        transfer_endpoint=peer.transfer_endpoint,
    )


def peer_from_pb(message: pb.Peer) -> PeerAddress:
    return PeerAddress(
        name=NodeName(message.name),
        incarnation=Incarnation(message.incarnation),
        host_id=message.host_id,
        transfer_endpoint=message.transfer_endpoint,
    )


def remote_prefix_to_pb(prefix: RemotePrefix | None) -> pb.Elsewhere | None:
    if prefix is None:
        return None
    pool = peer_to_pb(prefix.pool)
    return pb.Elsewhere(
        pool=pool, tokens=prefix.prefix_tokens, token_seconds=prefix.compute_seconds_per_token
    )


def remote_prefix_from_pb(message: pb.Elsewhere) -> RemotePrefix:
    return RemotePrefix(peer_from_pb(message.pool), message.tokens, max(0.0, message.token_seconds))


def ticket_to_pb(ticket: Ticket) -> pb.Ticket:
    return pb.Ticket(
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


def ticket_from_pb(message: pb.Ticket) -> Ticket:
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
