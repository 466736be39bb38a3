"""A pool among those of other hosts: it fetches from them, and sends them what they ask for."""

import asyncio
from dataclasses import replace
from typing import Any

from baton.clock import Clock
from baton.config import Config
from baton.types import Incarnation, NodeName
from kv_pool.host import PoolHost
from kv_pool.link import Channels, Dialer
from kv_pool.promotions import Promotions
from kv_pool.receiver import Receiver
from kv_pool.sender import Sender
from kv_pool.terms import PoolIdentity
from kv_transfer.advertised import has_port
from kv_transfer.factory import NOT_JOINED, build_inbound, build_outbound, settings_from
from kv_transfer.settings import TransferSettings


class Peers:
    """Of an open pool that is, or will be, a member."""

    def __init__(self, config: Config, host: PoolHost, name: str, dialer: Dialer, clock: Clock) -> None:
        settings = peer_settings(config)
        me = PoolIdentity(NodeName(name), host.host_id, host.segment, host.digest, host.layout)
        parts: dict[str, Any] = {
            "arena": host.memory,
            "layout": host.layout,
            "incarnation": NOT_JOINED,
            "token": config.cluster_token,
            "settings": settings,
            "host_id": host.host_id,
            "clock": clock,
        }
        self.receiver = Receiver(
            lambda emit: build_inbound(fences=None, emit=emit, **parts), me, Channels(dialer), settings.ticket_ttl
        )
        self.sender = Sender(lambda emit: build_outbound(emit=emit, **parts), me, host.pool, clock)
        self.promotions = promotions = Promotions(self.receiver, host.layout, host.checksums, clock)
        host.add_source(promotions)

    def rejoin(self, incarnation: Incarnation) -> None:
        """This pool's new one: what was under way with the old one fails."""
        self.receiver.rejoin(incarnation)
        self.sender.rejoin(incarnation)

    def counters(self) -> dict[str, float]:
        moved: dict[str, float] = {}
        for plane in (self.receiver, self.sender):
            for name, value in plane.counters().items():
                moved[f"baton_transfer_{name}_total"] = moved.get(f"baton_transfer_{name}_total", 0.0) + value
        return self.promotions.counters | self.sender.totals | moved

    async def close(self) -> None:
        await asyncio.gather(self.receiver.close(), self.sender.close())


def peer_settings(config: Config) -> TransferSettings:
    """Between hosts there is no shared memory, whatever nodes of one host use. The port is ephemeral: that of `listen`
    is for the pool's own protocol."""
    host, given = config.listen.rpartition(":")[0], config.advertise
    return replace(
        settings_from(config),
        transport="grpc" if config.transport == "grpc" else "zmq",
        listen=f"{host}:0",
        advertise=given.rpartition(":")[0] if has_port(given) else given,
    )
