"""What both ends of a grpc link share: the method, the proof of the token, connection options."""

from typing import Any

from baton.network.cluster_secret import derive_secret
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.core.message_framing import packed_message_size

SERVICE, METHOD = "baton.v1.KvTransfer", "Write"
SCHEME = "grpc"
PROOF_KEY = "baton-cluster-proof-bin"  # metadata of every stream
_MAX_METADATA_BYTES = 1 << 12
# Payload of one HTTP/2 frame. At 16 KiB, the default, framing costs more than copying.
_HTTP2_FRAME_BYTES = 1 << 18

Options = list[tuple[str, Any]]


def stream_proof(token: str) -> bytes:
    """Metadata that proves the writer has the cluster token, which itself is never sent."""
    return derive_secret(token, b"baton transfer stream v1", 32)


def channel_options(settings: TransferSettings) -> Options:
    """Connection options of both ends.

    HTTP/2's pings detect a host that is gone; threads that need no Python lock answer them."""
    timeout_ms = int(settings.link_timeout * 1000)
    return [
        (
            "grpc.max_receive_message_length",
            packed_message_size(MAX_HEADER_BYTES, settings.max_payload_bytes),
        ),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.http2.max_frame_size", _HTTP2_FRAME_BYTES),
        ("grpc.keepalive_time_ms", timeout_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]
