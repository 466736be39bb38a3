"""What simulated nodes tell the brain about themselves and about their hand-offs."""

from dataclasses import replace
from typing import Any

from baton.cluster_link.messages import PROTOCOL_VERSION, JoinInfo
from baton.cluster_link.report_types import HandoffReport
from baton.kv.blocks import KVLayout
from baton.types import (
    AttemptKey,
    Incarnation,
    NodeName,
    PeerAddress,
    Role,
    SegmentRef,
    Ticket,
    TicketId,
)

SMALL_LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")


def make_join_info(name: str, role: Role, **changes: Any) -> JoinInfo:
    """Return what a small node joins with; `changes` are fields of `JoinInfo`."""
    info = JoinInfo(
        protocol_version=PROTOCOL_VERSION,
        name=NodeName(name),
        role=role,
        host_id="h",
        transfer_endpoint=f"tcp://{name}",
        pid=1,
        model_digest="ab",
        layout=SMALL_LAYOUT,
        num_blocks=32,
        max_num_seqs=4,
        max_batched_tokens=64,
        max_model_len=256,
        vocab_size=1000,
        eos_token_ids=(2,),
        engine="paced",
        process=name,
        implementation="paced",
        dtype="float32",
    )
    return replace(info, **changes)


def make_ticket(node: Incarnation, key: AttemptKey, writer: Incarnation) -> Ticket:
    """Return decode node `node`'s permission for `writer`; there is one of each attempt."""
    return Ticket(
        id=make_ticket_id(key),
        key=key,
        decode_peer=PeerAddress(NodeName("d"), node, "h", "tcp://d"),
        writer_incarnation=writer,
        first_block=0,
        block_offsets=(0,),
        num_tokens=20,
        ttl_seconds=10.0,
        transport="shm",
        segment=SegmentRef("s", node),
        fence_byte=1,
    )


def make_ticket_id(key: AttemptKey) -> TicketId:
    return TicketId(f"t-{key}")


def make_handoff_report(num_bytes: int, exposed_seconds: float) -> HandoffReport:
    return HandoffReport(bytes=num_bytes, exposed_seconds=exposed_seconds, transport="shm")
