"""gRPC connections between a node and its pool, and between pools.

Both ends have a certificate derived from the cluster token (baton/network/cluster_certificates.py),
so that neither a process without the token nor one that took over a dead pool's port is trusted.
"""

from collections import OrderedDict

import grpc

from baton.errors import ConfigError
from baton.network.cluster_certificates import (
    DECODE_CERTIFICATE_NAME,
    decode_server_credentials,
    writer_channel_credentials,
)
from baton.network.connection_limits import PortLimit
from baton.network.grpc_options import LINK_CHANNEL_OPTIONS, grpc_server_options
from baton.pb import pool_pb2_grpc

_MAX_STREAMS = 256  # open at the same time
_MAX_STREAMS_PER_CONNECTION = 64  # a node has one; between two pools there is one per promotion
_IDLE_SECONDS = 60.0  # a connection without a stream is closed after this
_SERVER_OPTIONS = (*LINK_CHANNEL_OPTIONS, ("grpc.max_metadata_size", 1 << 12))
_CLIENT_OPTIONS = (
    *LINK_CHANNEL_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel reuses the old connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.ssl_target_name_override", DECODE_CERTIFICATE_NAME),
)


def make_server(
    where: str,
    token: str,
    nodes: pool_pb2_grpc.PoolLinkServicer,
    peers: pool_pb2_grpc.PoolPeersServicer,
    limit: PortLimit,
) -> tuple[grpc.aio.Server, int]:
    """Build a server that is not started yet; returns it with its port.

    Raises ConfigError when `where` (HOST:PORT) cannot be bound.
    """
    options = (
        *_SERVER_OPTIONS,
        *grpc_server_options(limit, streams=_MAX_STREAMS_PER_CONNECTION, idle=_IDLE_SECONDS),
    )
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_STREAMS)
    pool_pb2_grpc.add_PoolLinkServicer_to_server(nodes, server)
    pool_pb2_grpc.add_PoolPeersServicer_to_server(peers, server)
    try:
        port = server.add_secure_port(where, decode_server_credentials(token))
    except RuntimeError:
        raise ConfigError(
            f"the pool cannot listen on {where}: choose another --listen", param="listen"
        ) from None
    return server, port


class PoolDialer:
    """Opens channels to pools, with one certificate for all of them."""

    def __init__(self, token: str) -> None:
        self._credentials = writer_channel_credentials(token)

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Open a channel to the pool at `address`, HOST:PORT."""
        return grpc.aio.secure_channel(address, self._credentials, options=_CLIENT_OPTIONS)


class PeerChannels:
    """Channels to other pools, one per address, opened on demand and kept until they fail."""

    MAX_CHANNELS = 64  # beyond this the least recently used one is closed

    def __init__(self, dialer: PoolDialer) -> None:
        self._dialer = dialer
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def get_channel(self, address: str) -> grpc.aio.Channel:
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = self._dialer.open_channel(address)
        self._open.move_to_end(address)
        if len(self._open) > self.MAX_CHANNELS:
            await self._open.popitem(last=False)[1].close()
        return channel

    async def close_channel(self, address: str, channel: grpc.aio.Channel) -> None:
        """Close a channel that has failed; the next `get_channel` dials at once."""
        if self._open.get(address) is channel:
            del self._open[address]
        await channel.close()

    async def close(self) -> None:
        while self._open:
            await self._open.popitem()[1].close()
