"""A pool among those of other hosts: it fetches from them, and sends them what they ask for."""

import asyncio
from dataclasses import replace
from typing import Any

from baton.config.settings import Config
from baton.process.clock import Clock
from baton.types import Incarnation, NodeName
from kv_pool.common.grpc_link import PeerChannels, PoolDialer
from kv_pool.common.protocol import PoolIdentity
from kv_pool.peers.promotion_receiver import PromotionReceiver
from kv_pool.peers.promotion_sender import PromotionSender
from kv_pool.peers.promotion_source import PromotionSource
from kv_pool.service.pool_manager import PoolManager
from kv_transfer.common.advertised_address import has_port
from kv_transfer.common.settings import TransferSettings
from kv_transfer.factory import NOT_JOINED, build_kv_receiver, build_kv_sender, settings_from_config


class PeerPools:
    """Of an open pool that is, or will be, a member."""

    def __init__(
        self, config: Config, host: PoolManager, name: str, dialer: PoolDialer, clock: Clock
    ) -> None:
        settings = peer_transfer_settings(config)
        me = PoolIdentity(
            NodeName(name), host.host_id, host.segment_name, host.model_digest, host.layout
        )
        parts: dict[str, Any] = {
            "arena": host.segment_memory,
            "layout": host.layout,
            "incarnation": NOT_JOINED,
            "token": config.cluster_token,
            "settings": settings,
            "host_id": host.host_id,
            "clock": clock,
        }
        self.receiver = PromotionReceiver(
            lambda emit: build_kv_receiver(fences=None, emit=emit, **parts),
            me,
            PeerChannels(dialer),
            settings.ticket_ttl,
        )
        self.sender = PromotionSender(
            lambda emit: build_kv_sender(emit=emit, **parts), me, host.block_pool, clock
        )
        self.promotions = promotions = PromotionSource(
            self.receiver, host.layout, host.compute_checksums, clock
        )
        host.add_block_source(promotions)

    def rejoin(self, incarnation: Incarnation) -> None:
        """This pool's new one: what was under way with the old one fails."""
        self.receiver.rejoin(incarnation)
        self.sender.rejoin(incarnation)

    def counters(self) -> dict[str, float]:
        moved: dict[str, float] = {}
        for plane in (self.receiver, self.sender):
            for name, value in plane.counters().items():
                moved[f"baton_transfer_{name}_total"] = (
                    moved.get(f"baton_transfer_{name}_total", 0.0) + value
                )
        return self.promotions.counters | self.sender.block_counters | moved

    async def close(self) -> None:
        await asyncio.gather(self.receiver.close(), self.sender.close())


def peer_transfer_settings(config: Config) -> TransferSettings:
    """Between hosts there is no shared memory, whatever nodes of one host use. The port is
    ephemeral: that of `listen` is for the pool's own protocol."""
    host, given = config.listen.rpartition(":")[0], config.advertise
    return replace(
        settings_from_config(config),
        transport="grpc" if config.transport == "grpc" else "zmq",
        listen=f"{host}:0",
        advertise=given.rpartition(":")[0] if has_port(given) else given,
    )
