"""A pool's exchange of blocks with the pools of other hosts: fetching, sending and promotion."""

import asyncio
from dataclasses import replace
from typing import Any

from baton.config.pool_config import PoolConfig
from baton.network.advertised_address import has_port
from baton.process.clock import Clock
from baton.types import Incarnation, NodeName
from kv_pool.common.grpc_link import PeerChannels, PoolDialer
from kv_pool.common.protocol import PoolIdentity
from kv_pool.peers.promotion_receiver import PromotionReceiver
from kv_pool.peers.promotion_sender import PromotionSender
from kv_pool.peers.promotion_source import PromotionSource
from kv_pool.service.open_pool import OpenPool
from kv_transfer.common.settings import TransferSettings
from kv_transfer.factory import NOT_JOINED, build_kv_receiver, build_kv_sender, settings_from_config


class PeerPools:
    """Fetches blocks from other hosts' pools for an open pool, and sends blocks to them."""

    def __init__(
        self,
        config: PoolConfig,
        pool: OpenPool,
        host_id: str,
        name: str,
        dialer: PoolDialer,
        clock: Clock,
    ) -> None:
        settings = peer_transfer_settings(config)
        identity = PoolIdentity(
            NodeName(name),
            host_id,
            pool.store.name,
            pool.model_digest,
            pool.layout,
        )
        parts: dict[str, Any] = {
            "arena": pool.store.view,
            "layout": pool.layout,
            "incarnation": NOT_JOINED,
            "token": config.cluster_token,
            "settings": settings,
            "host_id": host_id,
            "clock": clock,
        }
        self.receiver = PromotionReceiver(
            lambda emit: build_kv_receiver(fences=None, emit=emit, **parts),
            identity,
            PeerChannels(dialer),
            settings.ticket_ttl,
        )
        self.sender = PromotionSender(
            lambda emit: build_kv_sender(emit=emit, **parts), identity, pool.block_pool, clock
        )
        self.promotions = promotions = PromotionSource(
            self.receiver, pool.layout, pool.store.compute_checksums, clock
        )
        pool.loader.sources.append(promotions)

    def rejoin(self, incarnation: Incarnation) -> None:
        """Adopt this pool's new incarnation; transfers of the old one fail."""
        self.receiver.rejoin(incarnation)
        self.sender.rejoin(incarnation)

    def counters(self) -> dict[str, float]:
        transfer_counters: dict[str, float] = {}
        for plane in (self.receiver, self.sender):
            for name, value in plane.counters().items():
                metric = f"baton_transfer_{name}_total"
                transfer_counters[metric] = transfer_counters.get(metric, 0.0) + value
        return self.promotions.counters | self.sender.block_counters | transfer_counters

    async def close(self) -> None:
        await asyncio.gather(self.receiver.close(), self.sender.close())


def peer_transfer_settings(config: PoolConfig) -> TransferSettings:
    """Return the transfer settings between pools.

    The transport is zmq or grpc, because there is no shared memory between hosts. The port is
    ephemeral, because that of `listen` belongs to the pool's own protocol.
    """
    host, advertised = config.listen.rpartition(":")[0], config.advertise
    return replace(
        settings_from_config(config),
        transport="grpc" if config.transport == "grpc" else "zmq",
        listen=f"{host}:0",
        advertise=advertised.rpartition(":")[0] if has_port(advertised) else advertised,
    )
