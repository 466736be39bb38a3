"""Converts the types that several kinds of messages carry to protobuf and back.

No other code reads fields of the messages that carry these types.
"""

import math

from baton.cluster_link.report_types import HandoffReport, LedgerOwner, MemberLedger
from baton.errors import BatonError, error_from_code
from baton.kv.blocks import KVLayout
from baton.pb import cluster_pb2, common_pb2
from baton.types import (
    FinishReason,
    Incarnation,
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
        slowed_seconds=report.slowed_seconds,
        group_layers=report.group_layers,
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
        slowed_seconds=check_seconds(message.slowed_seconds),
        group_layers=message.group_layers,
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
