"""Dials the coordinator's cluster port: mutual TLS, and a proof of the cluster token.

The keys are derived from the cluster token, which itself never crosses the wire.
"""

from collections.abc import Sequence
from typing import Any

import grpc

from baton.cluster_link import stream as link_stream
from baton.network.cluster_certificates import (
    COORDINATOR_CERTIFICATE_NAME,
    node_channel_credentials,
)
from baton.network.cluster_secret import derive_secret
from baton.network.grpc_options import LINK_CHANNEL_OPTIONS

PROOF_METADATA_KEY = "baton-cluster-proof-bin"  # metadata of every stream
_CHANNEL_OPTIONS = (
    *LINK_CHANNEL_OPTIONS,
    ("grpc.ssl_target_name_override", COORDINATOR_CERTIFICATE_NAME),
    # Without this a new channel reuses the connection of the last one, which may be dead.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_OTHER_TOKEN = "CERTIFICATE_VERIFY_FAILED"  # BoringSSL's error, in the details of a failed call
_NO_TLS = "WRONG_VERSION_NUMBER"  # likewise


def derive_link_proof(token: str) -> bytes:
    """Return 32 bytes that only a process with this cluster token can know."""
    return derive_secret(token, b"baton node link v1", 32)


class CoordinatorDialer:
    """Opens channels and streams to the coordinator with one certificate of this process."""

    def __init__(self, token: str) -> None:
        self._credentials = node_channel_credentials(token)
        self._metadata = ((PROOF_METADATA_KEY, derive_link_proof(token)),)

    def open_channel(
        self, address: str, options: Sequence[tuple[str, Any]] = ()
    ) -> grpc.aio.Channel:
        """Open a new connection to the coordinator at `address` (HOST:PORT)."""
        return grpc.aio.secure_channel(
            address, self._credentials, options=(*_CHANNEL_OPTIONS, *options)
        )

    def open_stream(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall:
        """Open a stream and send the proof of the token as metadata."""
        return link_stream.open_link_stream(channel, metadata=self._metadata)


def is_token_mismatch(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server's keys belong to another cluster token than ours."""
    return _OTHER_TOKEN in (error.details() or "")


def describe_link_failure(error: grpc.aio.AioRpcError) -> str:
    """Say in a few words why a stream could not be opened, or broke."""
    if is_token_mismatch(error):
        return "wrong cluster token: who answers there has another one"
    if _NO_TLS in (error.details() or ""):
        return "what answers there does not speak TLS: is it a coordinator's --cluster-port?"
    return str(error.code().name)
