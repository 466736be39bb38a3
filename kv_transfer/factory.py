"""Builds both planes from settings, so that no role knows a backend."""

from collections.abc import Callable

from baton.clock import Clock, steady
from baton.failpoints import FAILPOINTS, Failpoints
from baton.fence import ArenaFences
from baton.kv_layout import KVLayout
from baton.segment import host_id as host_of
from baton.types import Incarnation
from kv_transfer.inbound_plane import InboundTransfer
from kv_transfer.memory_link import MemoryDecodeLink, MemoryDialer
from kv_transfer.outbound_plane import OutboundTransfer
from kv_transfer.plane import InboundEvent, InboundPlane, OutboundEvent, OutboundPlane
from kv_transfer.security import derive_keys
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import DecodeLink, Dialer
from kv_transfer.zmq_link import ZmqDecodeLink, ZmqDialer


def build_inbound(
    *,
    arena: memoryview,
    layout: KVLayout,
    incarnation: Incarnation,
    token: str,
    fences: ArenaFences | None,
    emit: Callable[[InboundEvent], None],
    settings: TransferSettings | None = None,
    host_id: str = "",
    clock: Clock = steady,
    failpoints: Failpoints = FAILPOINTS,
) -> InboundPlane:
    """Decode's plane over the blocks in `arena`. `fences` are those of the arena's segment, None if it is
    none. `token` is the cluster token; `host_id` defaults to that of the segment folder."""
    settings = settings or TransferSettings()
    link: DecodeLink
    if settings.transport == "memory":
        link = MemoryDecodeLink()
    else:
        link = ZmqDecodeLink(derive_keys(token), settings)
    return InboundTransfer(
        arena=arena,
        layout=layout,
        incarnation=incarnation,
        link=link,
        fences=fences,
        host_id=host_id or host_of(settings.segment_folder),
        settings=settings,
        emit=emit,
        clock=clock,
        failpoints=failpoints,
    )


def build_outbound(
    *,
    arena: memoryview,
    layout: KVLayout,
    incarnation: Incarnation,
    token: str,
    emit: Callable[[OutboundEvent], None],
    settings: TransferSettings | None = None,
    host_id: str = "",
    clock: Clock = steady,
    failpoints: Failpoints = FAILPOINTS,
) -> OutboundPlane:
    """Prefill's plane over the blocks in `arena`. It dials whatever backend a ticket names."""
    settings = settings or TransferSettings()
    dialers: dict[str, Dialer] = {"memory": MemoryDialer(), "tcp": ZmqDialer(derive_keys(token), settings)}
    return OutboundTransfer(
        arena=arena,
        layout=layout,
        incarnation=incarnation,
        dialers=dialers,
        host_id=host_id or host_of(settings.segment_folder),
        settings=settings,
        emit=emit,
        clock=clock,
        failpoints=failpoints,
    )
