"""Builds both planes, so that no role knows a transport.

`make_inbound_plane` and `make_outbound_plane` build them from a node's parts; `build_kv_receiver`
and `build_kv_sender` from single values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from baton.config.common import MemberConfig
from baton.kv.blocks import KVLayout
from baton.process.clock import Clock, monotonic_clock
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.shared_memory.fence import ArenaFences
from baton.shared_memory.segment import Segment, compute_host_id
from baton.types import Incarnation
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.events import InboundEvent, OutboundEvent
from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.kv_receiver import KVReceiver
from kv_transfer.kv_sender import KVSender
from kv_transfer.plane import InboundPlane, OutboundPlane
from kv_transfer.transports.registry import make_decode_link, make_peer_links

_RENEWALS_PER_TTL = 10  # how often a ticket is renewed within its time to live
NOT_JOINED = Incarnation("")  # until `rejoin`


class _HasLayout(Protocol):
    @property
    def layout(self) -> KVLayout: ...


class PlaneContext(Protocol):
    """The parts of a node that its transfer plane needs."""

    @property
    def config(self) -> MemberConfig: ...
    @property
    def host_id(self) -> str: ...
    @property
    def engine(self) -> _HasLayout: ...
    @property
    def arena(self) -> Segment: ...
    @property
    def block_memory(self) -> memoryview: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def emit(self) -> Callable[[Any], None]: ...


def settings_from_config(config: MemberConfig) -> TransferSettings:
    """The plane's settings in a node's configuration."""
    return TransferSettings(
        transport=config.transport,
        listen=config.listen,
        insecure=config.insecure,
        advertise=config.advertise,
        segment_folder=Path(config.segment_dir),
        ticket_ttl=config.ticket_ttl,
        progress_timeout=config.progress_timeout,
        renew_interval=config.ticket_ttl / _RENEWALS_PER_TTL,
        link_timeout=config.silence,
        layers_per_message=config.layers_per_message,
        max_connections_per_address=config.max_connections_per_address,
    )


def make_inbound_plane(parts: PlaneContext, device: TransferDevice | None = None) -> InboundPlane:
    """Decode's plane over the node's arena. It has no incarnation until `rejoin`.

    `device` is the memory that the node computes in, if it is not the arena."""
    return build_kv_receiver(
        arena=parts.arena.view,
        layout=parts.engine.layout,
        incarnation=NOT_JOINED,
        token=parts.config.cluster_token,
        fences=ArenaFences(parts.arena.path),
        emit=parts.emit,
        settings=settings_from_config(parts.config),
        host_id=parts.host_id,
        clock=parts.clock,
        device=device if device is not None and device.receives else None,
    )


def make_outbound_plane(parts: PlaneContext, device: TransferDevice | None = None) -> OutboundPlane:
    """Prefill's plane over all blocks that the node can read. No incarnation until `rejoin`."""
    return build_kv_sender(
        arena=parts.block_memory,
        layout=parts.engine.layout,
        incarnation=NOT_JOINED,
        token=parts.config.cluster_token,
        emit=parts.emit,
        settings=settings_from_config(parts.config),
        host_id=parts.host_id,
        clock=parts.clock,
        device=device if device is not None and device.writer_name else None,
    )


def build_kv_receiver(
    *,
    arena: memoryview,
    layout: KVLayout,
    incarnation: Incarnation,
    token: str,
    fences: ArenaFences | None,
    emit: Callable[[InboundEvent], None],
    settings: TransferSettings | None = None,
    host_id: str = "",
    clock: Clock = monotonic_clock,
    failpoints: Failpoints = FAILPOINTS,
    device: TransferDevice | None = None,
) -> KVReceiver:
    """Decode's plane over the blocks in `arena`, and over `device` with the same blocks.

    `fences` are those of the arena's segment, None if it is not a segment; the plane closes them.
    `token` is the cluster token. `host_id` is that of the segment folder by default."""
    settings = settings or TransferSettings()
    return KVReceiver(
        arena=arena,
        layout=layout,
        incarnation=incarnation,
        link=make_decode_link(settings, token, fences.segment_path if fences else None),
        fences=fences,
        host_id=host_id or compute_host_id(settings.segment_folder),
        settings=settings,
        emit=emit,
        clock=clock,
        failpoints=failpoints,
        device=device,
    )


def build_kv_sender(
    *,
    arena: memoryview,
    layout: KVLayout,
    incarnation: Incarnation,
    token: str,
    emit: Callable[[OutboundEvent], None],
    settings: TransferSettings | None = None,
    host_id: str = "",
    clock: Clock = monotonic_clock,
    failpoints: Failpoints = FAILPOINTS,
    device: TransferDevice | None = None,
) -> KVSender:
    """Prefill's plane over the blocks in `arena`, which are read in `device` if there is one.

    It dials any transport that a ticket names."""
    settings = settings or TransferSettings()
    return KVSender(
        arena=arena,
        layout=layout,
        incarnation=incarnation,
        links=make_peer_links(token, settings),
        host_id=host_id or compute_host_id(settings.segment_folder),
        settings=settings,
        emit=emit,
        clock=clock,
        failpoints=failpoints,
        device=device,
    )
