"""The transports by name: the one place that knows all of them.

A new transport implements the links of kv_transfer/transports/links.py and gets its line in
`_make_network_link` and `make_peer_links`.
"""

from pathlib import Path

from baton.network.bind_policy import get_endpoint_host, require_key_unless_loopback
from baton.process import log
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.handoff_common import is_one_sided
from kv_transfer.transports.grpc_decode_link import GrpcDecodeLink
from kv_transfer.transports.grpc_protocol import SCHEME
from kv_transfer.transports.grpc_writer_link import GrpcDialer
from kv_transfer.transports.links import DecodeLink, PeerLinks, TransferDialer
from kv_transfer.transports.local_link import HostDecodeLink, LocalDecodeLink, LocalDialer
from kv_transfer.transports.memory_link import MemoryDecodeLink, MemoryDialer
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.transports.zmq_link import ZmqDecodeLink, ZmqDialer


def make_decode_link(
    settings: TransferSettings, token: str, segment_path: Path | None
) -> DecodeLink:
    """Make the links on which a decode node receives, by the transport in `settings`.

    `segment_path` is that of its arena, None if the arena is not a segment. Raises ConfigError when
    `settings.listen` is not allowed or cannot be bound.
    """
    network = _make_network_link(settings, token)
    if segment_path is None or not (
        settings.transport == "auto" or is_one_sided(settings.transport)
    ):
        return network
    try:
        return HostDecodeLink(network, LocalDecodeLink(segment_path))
    except OSError as error:
        log.get_logger("transfer").warning(
            "no local transfer link: writers on this host use the network link", reason=str(error)
        )
        return network


def _make_network_link(settings: TransferSettings, token: str) -> DecodeLink:
    if settings.transport == "memory":
        return MemoryDecodeLink()
    require_key_unless_loopback(
        "--listen",
        get_endpoint_host(settings.listen),
        "cluster_token",
        token,
        insecure=settings.insecure,
    )
    if settings.transport == "grpc":
        return GrpcDecodeLink(token, settings)
    return ZmqDecodeLink(derive_curve_keys(token), settings)


def make_peer_links(token: str, settings: TransferSettings) -> PeerLinks:
    """Make what dials decode nodes, by the scheme of the endpoint that a ticket names."""
    dialers: dict[str, TransferDialer] = {
        "memory": MemoryDialer(),
        "tcp": ZmqDialer(derive_curve_keys(token), settings),
        SCHEME: GrpcDialer(token, settings),
    }
    return PeerLinks(dialers, LocalDialer(settings.segment_folder))
