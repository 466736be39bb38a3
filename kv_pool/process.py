"""The process: the pool's port, health, and membership of the cluster. Stop: say so, answer what was asked, then take
everything down. Readers go on reading what they have mapped."""

import asyncio
import os
from pathlib import Path
from typing import Any

from baton import log
from baton import segment as segments
from baton.advertise import advertised
from baton.clock import steady
from baton.config import Config
from baton.connection_guard import ConnectionGuard
from baton.connection_limits import port_limit
from baton.descriptors import descriptor_limit
from baton.errors import ConfigError
from baton.exposure import host_part, require_key
from baton.health_port import HealthPort
from baton.memory_room import memory_room, no_room
from baton.memory_size import AUTO, MOST_POOL_TOKENS, memory_of, parse_memory
from baton.types import mint_id
from kv_pool.core.policies import POLICIES
from kv_pool.disk_file import FOLDER_KNOB, NAME
from kv_pool.disk_mount import DiskTerms
from kv_pool.host import PoolHost
from kv_pool.link import Dialer, listening
from kv_pool.membership import ROLE, Membership
from kv_pool.peer_service import PeerService
from kv_pool.peers import Peers
from kv_pool.service import PoolService
from kv_pool.store import KNOB
from kv_transfer.advertised import dialled

_DRIFT = 0.25  # of a share of the disk: by less its file is not made anew


async def host_pool(config: Config, stop: asyncio.Event) -> None:
    """Run the pool of this host until `stop` is set. Raises ConfigError for what a restart would not mend."""
    name = config.name or f"{ROLE}-{mint_id(32)}"
    log.configure(config.log_level, config.log_format, node=name)
    require_key("--listen", host_part(config.listen), "cluster_token", config.cluster_token, insecure=config.insecure)
    folder = Path(config.segment_dir)
    segments.sweep(folder)
    size = pool_bytes(config)
    log.get("pool").info("pool sized", bytes=size)
    await _Process(config, name, folder, size, disk_terms(config)).run(stop)


def pool_bytes(config: Config) -> int:
    """Raises ConfigError unless the segment folder and the memory can hold so much now."""
    folder = Path(config.segment_dir)
    try:
        room = memory_room(folder)
        promised = segments.promised_bytes(folder)
    except OSError as error:
        raise ConfigError(
            f"segment_dir {config.segment_dir!r} cannot be used ({error.strerror}): give --segment-dir a folder"
        ) from None
    size = memory_of(config.pool_memory, room, "pool_memory")
    if size > room.usable - promised:
        raise no_room(folder, size, room, KNOB, promised)
    return size


def disk_terms(config: Config) -> DiskTerms | None:
    """None if there is to be no disk. Raises ConfigError for a size that is none, or nowhere to put it."""
    if not config.has_pool_disk:
        return None
    where = config.pool_disk_dir or config.state_dir
    if not where:
        raise ConfigError(f"pool_disk is {config.pool_disk!r}, and there is no folder for it: give {FOLDER_KNOB}")
    folder = Path(where)
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    used = (folder / NAME).stat().st_size if (folder / NAME).exists() else 0
    room = segments.free_bytes(there) + used
    size = parse_memory(config.pool_disk, room, "pool_disk")
    is_share = parse_memory(config.pool_disk, 0, "pool_disk") == 0
    if is_share and abs(size - used) <= _DRIFT * size:
        size = used  # free space is never twice the same: what the file holds is worth more than a few blocks
    return DiskTerms(folder, size)


class _Process:
    def __init__(self, config: Config, name: str, folder: Path, size: int, disk: DiskTerms | None) -> None:
        self._config, self._name = config, name
        self._connections = ConnectionGuard()
        self._peers: Peers | None = None
        self._peer_service = PeerService()
        self._membership: Membership | None = None
        self._open = asyncio.Event()
        self._host = PoolHost(
            folder,
            size,
            POLICIES[config.pool_eviction],
            steady,
            host_id=config.host_id,
            disk=disk,
            most_tokens=MOST_POOL_TOKENS if config.pool_memory == AUTO else None,
            opened=self._open.set,
            changed=self._changed,
        )

    async def run(self, stop: asyncio.Event) -> None:
        config = self._config
        service = PoolService(self._host)
        limit = port_limit("pool", descriptor_limit(), per_address=config.max_connections_per_address)
        server, port = listening(config.listen, config.cluster_token, service, self._peer_service, limit)
        health = HealthPort(config)
        self._connections.watch("pool", port, limit)
        stopping = asyncio.create_task(stop.wait())
        member = asyncio.create_task(self._be_member(str(port), stop))
        try:
            await server.start()
            await health.start()
            where = dialled(config.listen.rpartition(":")[0], str(port))
            log.get("pool").info("serving", endpoint=where, health_port=health.port, pid=os.getpid())
            ends: set[asyncio.Future[Any]] = {stopping, member, self._host.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in (member, self._host.failed):
                if end.done():
                    end.result()
            await health.leaving()
            if self._membership is not None:
                self._membership.leaving()
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
            await self._host.close()

    async def _be_member(self, port: str, stop: asyncio.Event) -> None:
        """From the moment on at which there is something to tell. Without a coordinator, for ever alone."""
        await self._open.wait()
        if not self._config.coordinator:
            await asyncio.Event().wait()
        config = await advertised(self._config, stop)
        dialer = await asyncio.to_thread(Dialer, config.cluster_token)
        self._peers = Peers(config, self._host, self._name, dialer, steady)
        self._peer_service.sender = self._peers.sender
        endpoint = dialled(config.advertise or config.listen.rpartition(":")[0], port)
        self._membership = Membership(config, self._name, self._host, self._peers, endpoint, steady)
        await self._membership.run()

    def _changed(self) -> None:
        if self._membership is not None:
            self._membership.changed()
