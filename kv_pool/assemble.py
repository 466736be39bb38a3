"""A pool process, assembled: the pool's port, its health port and its cluster membership.

To stop, it announces the shutdown, answers the questions it has received, ends its link to the
coordinator in order, and then closes everything. Nodes keep reading the blocks that they have
mapped.
"""

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
from baton.config.pool_config import PoolConfig
from baton.errors import ConfigError
from baton.network.advertised_address import address_to_dial, with_advertised_address
from baton.network.bind_policy import (
    get_endpoint_host,
    parse_endpoint,
    require_key_unless_loopback,
)
from baton.network.connection_guard import ConnectionGuard
from baton.network.connection_limits import compute_port_limit
from baton.network.health_port import HealthPort
from baton.process import log
from baton.process.clock import monotonic_clock
from baton.process.descriptors import get_descriptor_limit
from baton.process.startup import STARTUP
from baton.shared_memory import segment as segments
from baton.shared_memory.available_memory import insufficient_memory_error, measure_available_memory
from kv_pool.cluster_member import PoolClusterMember, choose_member_name
from kv_pool.common.grpc_link import PoolDialer, make_server
from kv_pool.core.eviction.policies import EVICTION_POLICIES
from kv_pool.disk.data_file import DISK_FILE_NAME, DISK_FOLDER_FLAG
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.segment_store import MEMORY_SIZE_FLAG
from kv_pool.peers.peer_pools import PeerPools
from kv_pool.peers.peer_service import PoolPeerService
from kv_pool.service.link_service import PoolLinkService
from kv_pool.service.pool_manager import PoolManager

# If `pool_disk` is a share of the free space, an existing file that differs by less is kept.
_SIZE_TOLERANCE = 0.25


async def run_pool(config: PoolConfig, stop: asyncio.Event) -> None:
    """Run the pool of this host until `stop` is set.

    Raises ConfigError for errors that a restart would not fix.
    """
    name = choose_member_name(config)
    log.configure_logging(config.log_level, config.log_format, node=name)
    require_key_unless_loopback(
        "--listen",
        get_endpoint_host(config.listen),
        "cluster_token",
        config.cluster_token,
        insecure=config.insecure,
    )
    if config.coordinator:
        parse_endpoint(config.coordinator, "--coordinator", "coordinator")
    folder = Path(config.segment_dir)
    segments.remove_stale_segments(folder)
    size = pool_memory_bytes(config)
    log.get_logger("pool").info("pool memory size chosen", bytes=size)
    await _PoolProcess(config, name, folder, size, disk_settings(config)).run(stop)


def pool_memory_bytes(config: PoolConfig) -> int:
    """Return the size of the segment to create.

    Raises ConfigError if the segment folder or the host's memory cannot hold it now.
    """
    folder = Path(config.segment_dir)
    try:
        room = measure_available_memory(folder)
        promised = segments.unfilled_bytes(folder)
    except OSError as error:
        raise ConfigError(
            f"segment_dir {config.segment_dir!r} cannot be used ({error.strerror}): "
            "give --segment-dir a folder"
        ) from None
    size = resolve_memory_size(config.pool_memory, room, "pool_memory")
    if size > room.usable_bytes - promised:
        raise insufficient_memory_error(folder, size, room, MEMORY_SIZE_FLAG, promised)
    return size


def disk_settings(config: PoolConfig) -> DiskSettings | None:
    """Return folder and size of the disk's files; None if the pool is to have no disk.

    Raises ConfigError for an invalid size, and if no folder is configured.
    """
    if not config.has_pool_disk:
        return None
    where = config.pool_disk_dir or config.state_dir
    if not where:
        raise ConfigError(
            f"pool_disk is {config.pool_disk!r}, and there is no folder for it: "
            f"give {DISK_FOLDER_FLAG}"
        )
    folder = Path(where)
    used, free = _measure_disk(folder)
    available = used + free
    size = parse_memory_size(config.pool_disk, available, "pool_disk")
    is_share = parse_memory_size(config.pool_disk, 0, "pool_disk") == 0
    if is_share and abs(size - used) <= _SIZE_TOLERANCE * size:
        # Free space varies between runs; the file's contents are worth more than a few more blocks.
        size = used
    return DiskSettings(folder=folder, size_bytes=size)


def _measure_disk(folder: Path) -> tuple[int, int]:
    """Bytes of the pool's file in the folder, and bytes that are free where the folder is.

    The folder need not exist. Raises ConfigError if a parent cannot be searched.
    """
    file = folder / DISK_FILE_NAME
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        used = file.stat().st_size if file.exists() else 0
        return used, segments.free_bytes(existing)
    except OSError as error:
        raise ConfigError(
            f"the pool's disk folder {folder} cannot be used ({error.strerror}): "
            f"give {DISK_FOLDER_FLAG} another"
        ) from None


class _PoolProcess:
    """The parts of a running pool process."""

    def __init__(
        self, config: PoolConfig, name: str, folder: Path, size: int, disk: DiskSettings | None
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
            disk_settings=disk,
            max_tokens=MAX_AUTO_POOL_TOKENS if config.pool_memory == AUTO else None,
            on_opened=self._is_open.set,
            on_changed=self._on_index_changed,
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
            STARTUP.finish("ports")
            ends: set[asyncio.Future[Any]] = {stopping, member, self._manager.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in (member, self._manager.failure):
                if end.done():
                    end.result()
            await health.announce_shutdown()
            await self._leave_cluster(service)
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

    async def _leave_cluster(self, service: PoolLinkService) -> None:
        if self._member is not None:
            self._member.send_leaving()
        await service.drain()
        if self._member is not None:
            await self._member.close()

    async def _run_member(self, port: str, stop: asyncio.Event) -> None:
        """Join the cluster once the pool is open; without a coordinator, wait for ever."""
        await self._is_open.wait()
        if not self._config.coordinator:
            await asyncio.Event().wait()
        config = await with_advertised_address(self._config, stop)
        dialer = await asyncio.to_thread(PoolDialer, config.cluster_token)
        self._peers = PeerPools(
            config,
            self._manager.open_pool,
            self._manager.host_id,
            self._name,
            dialer,
            monotonic_clock,
        )
        self._peer_service.sender = self._peers.sender
        endpoint = address_to_dial(config.advertise or config.listen.rpartition(":")[0], port)
        self._member = PoolClusterMember(
            config, self._name, self._manager, self._peers, endpoint, monotonic_clock
        )
        await self._member.run()

    def _on_index_changed(self) -> None:
        if self._member is not None:
            self._member.on_index_changed()
