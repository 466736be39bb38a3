"""The process: the pool's port, health, and membership of the cluster. Stop: say so, answer what
was asked, then take everything down. Readers go on reading what they have mapped."""

import asyncio
import os
from pathlib import Path
from typing import Any

from baton.config.memory_size import (
    AUTO,
    MAX_AUTO_POOL_TOKENS,
    parse_memory_size,
    resolve_memory_size,
)
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.network.advertised_address import with_advertised_address
from baton.network.bind_policy import get_endpoint_host, require_key_unless_loopback
from baton.network.connection_guard import ConnectionGuard
from baton.network.connection_limits import compute_port_limit
from baton.network.health_port import HealthPort
from baton.process import log
from baton.process.clock import monotonic_clock
from baton.process.descriptors import get_descriptor_limit
from baton.shared_memory import segment as segments
from baton.shared_memory.available_memory import insufficient_memory_error, measure_available_memory
from baton.types import mint_id
from kv_pool.cluster_member import POOL_ROLE, PoolClusterMember
from kv_pool.common.grpc_link import PoolDialer, make_server
from kv_pool.core.eviction.policies import EVICTION_POLICIES
from kv_pool.disk.data_file import DISK_FILE_NAME, DISK_FOLDER_FLAG
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.segment_store import MEMORY_SIZE_FLAG
from kv_pool.peers.peer_pools import PeerPools
from kv_pool.peers.peer_service import PoolPeerService
from kv_pool.service.link_service import PoolLinkService
from kv_pool.service.pool_manager import PoolManager
from kv_transfer.common.advertised_address import address_to_dial

_SIZE_TOLERANCE = 0.25  # of a share of the disk: by less its file is not made anew


async def run_pool(config: Config, stop: asyncio.Event) -> None:
    """Run the pool of this host until `stop` is set. Raises ConfigError for what a restart would
    not mend."""
    name = config.name or f"{POOL_ROLE}-{mint_id(32)}"
    log.configure_logging(config.log_level, config.log_format, node=name)
    require_key_unless_loopback(
        "--listen",
        get_endpoint_host(config.listen),
        "cluster_token",
        config.cluster_token,
        insecure=config.insecure,
    )
    folder = Path(config.segment_dir)
    segments.remove_stale_segments(folder)
    size = pool_memory_bytes(config)
    log.get_logger("pool").info("pool sized", bytes=size)
    await _PoolProcess(config, name, folder, size, disk_settings(config)).run(stop)


def pool_memory_bytes(config: Config) -> int:
    """Raises ConfigError unless the segment folder and the memory can hold so much now."""
    folder = Path(config.segment_dir)
    try:
        room = measure_available_memory(folder)
        promised = segments.unfilled_bytes(folder)
    except OSError as error:
        raise ConfigError(
            f"segment_dir {config.segment_dir!r} cannot be used ({error.strerror}): give --segment-dir a folder"
        ) from None
    size = resolve_memory_size(config.pool_memory, room, "pool_memory")
    if size > room.usable_bytes - promised:
        raise insufficient_memory_error(folder, size, room, MEMORY_SIZE_FLAG, promised)
    return size


def disk_settings(config: Config) -> DiskSettings | None:
    """None if there is to be no disk. Raises ConfigError for a size that is none, or nowhere to put
    it."""
    if not config.has_pool_disk:
        return None
    where = config.pool_disk_dir or config.state_dir
    if not where:
        raise ConfigError(
            f"pool_disk is {config.pool_disk!r}, and there is no folder for it: give {DISK_FOLDER_FLAG}"
        )
    folder = Path(where)
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    used = (folder / DISK_FILE_NAME).stat().st_size if (folder / DISK_FILE_NAME).exists() else 0
    room = segments.free_bytes(there) + used
    size = parse_memory_size(config.pool_disk, room, "pool_disk")
    is_share = parse_memory_size(config.pool_disk, 0, "pool_disk") == 0
    if is_share and abs(size - used) <= _SIZE_TOLERANCE * size:
        # free space is never twice the same: what the file holds is worth more than a few blocks
        size = used
    return DiskSettings(folder, size)


class _PoolProcess:
    def __init__(
        self, config: Config, name: str, folder: Path, size: int, disk: DiskSettings | None
    ) -> None:
        self._config, self._name = config, name
        self._connections = ConnectionGuard()
        self._peers: PeerPools | None = None
        self._peer_service = PoolPeerService()
        self._member: PoolClusterMember | None = None
        self._is_open = asyncio.Event()
        self._manager = PoolManager(
            folder,
            size,
            EVICTION_POLICIES[config.pool_eviction],
            monotonic_clock,
            host_id=config.host_id,
            disk=disk,
            most_tokens=MAX_AUTO_POOL_TOKENS if config.pool_memory == AUTO else None,
            opened=self._is_open.set,
            changed=self._on_index_changed,
        )

    async def run(self, stop: asyncio.Event) -> None:
        config = self._config
        service = PoolLinkService(self._manager)
        limit = compute_port_limit(
            "pool", get_descriptor_limit(), per_address=config.max_connections_per_address
        )
        server, port = make_server(
            config.listen, config.cluster_token, service, self._peer_service, limit
        )
        health = HealthPort(config)
        self._connections.watch_port("pool", port, limit)
        stopping = asyncio.create_task(stop.wait())
        member = asyncio.create_task(self._run_member(str(port), stop))
        try:
            await server.start()
            await health.start()
            where = address_to_dial(config.listen.rpartition(":")[0], str(port))
            log.get_logger("pool").info(
                "serving", endpoint=where, health_port=health.port, pid=os.getpid()
            )
            ends: set[asyncio.Future[Any]] = {stopping, member, self._manager.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in (member, self._manager.failure):
                if end.done():
                    end.result()
            await health.announce_shutdown()
            if self._member is not None:
                self._member.send_leaving()
            await service.drain()
        finally:
            for task in (stopping, member):
                task.cancel()
            await asyncio.gather(stopping, member, return_exceptions=True)
            await server.stop(grace=None)
            await health.stop()
            await asyncio.to_thread(self._connections.close)
            if self._peers is not None:
                await self._peers.close()
            await self._manager.close()

    async def _run_member(self, port: str, stop: asyncio.Event) -> None:
        """From the moment on at which there is something to tell. Without a coordinator, for ever
        alone."""
        await self._is_open.wait()
        if not self._config.coordinator:
            await asyncio.Event().wait()
        config = await with_advertised_address(self._config, stop)
        dialer = await asyncio.to_thread(PoolDialer, config.cluster_token)
        self._peers = PeerPools(config, self._manager, self._name, dialer, monotonic_clock)
        self._peer_service.sender = self._peers.sender
        endpoint = address_to_dial(config.advertise or config.listen.rpartition(":")[0], port)
        self._member = PoolClusterMember(
            config, self._name, self._manager, self._peers, endpoint, monotonic_clock
        )
        await self._member.run()

    def _on_index_changed(self) -> None:
        if self._member is not None:
            self._member.on_index_changed()
