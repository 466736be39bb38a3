"""The connection between a node and its pool: gRPC over loopback, both ends with a certificate that only the cluster
token can make (kv_transfer/certificates.py), so that neither a process without the token nor one that took a dead
pool's port is believed."""

import grpc

from baton.errors import ConfigError
from baton.limits import LINK_OPTIONS
from baton.pb import pool_pb2_grpc
from kv_transfer.certificates import DECODE_NAME, decode_credentials, writer_credentials

_STREAMS = 256  # at a time
_SERVER_OPTIONS = (*LINK_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.max_metadata_size", 1 << 12))
_CLIENT_OPTIONS = (
    *LINK_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel gets the connection of the last one
    ("grpc.enable_http_proxy", 0),
    ("grpc.ssl_target_name_override", DECODE_NAME),
)


def listening(where: str, token: str, servicer: pool_pb2_grpc.PoolLinkServicer) -> tuple[grpc.aio.Server, int]:
    """A server that is not started yet, and its port. Raises ConfigError when `where`, HOST:PORT, cannot be bound."""
    server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=_STREAMS)
    pool_pb2_grpc.add_PoolLinkServicer_to_server(servicer, server)
    try:
        port = server.add_secure_port(where, decode_credentials(token))
    except RuntimeError:
        raise ConfigError(f"the pool cannot listen on {where}: choose another --listen", param="listen") from None
    return server, port


class Dialer:
    """Of one pool. Its certificate is made once."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._credentials = writer_credentials(token)

    def dial(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self._address, self._credentials, options=_CLIENT_OPTIONS)
