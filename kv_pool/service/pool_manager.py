"""The pool of one host: opens its segment, attaches clients and removes those that have ended.

It serves one model, that of the first node that attaches; the segment is created then, because only
then is the size of a block known. An attachment has ended when the pool can lock its byte of the
fence file, which the node keeps locked as long as it uses the segment.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

from baton.errors import ConfigError, LayoutMismatch, StaleMessage
from baton.kv.cache_journal import CacheJournal
from baton.process import log
from baton.process.clock import Clock
from baton.shared_memory.segment import compute_host_id
from baton.types import mint_id
from kv_pool.common.protocol import POOL_PROTOCOL_VERSION, RETRY_SECONDS
from kv_pool.core.blocks.attachments import (
    PoolClientId,
)
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.segment_store import make_store
from kv_pool.service.client_session import PoolClientSession
from kv_pool.service.open_pool import AttachRequest, OpenPool


class PoolManager:
    """The pool of one host, from its start to its end."""

    def __init__(
        self,
        folder: Path,
        size: int,
        make_evictor: EvictorFactory,
        clock: Clock,
        *,
        host_id: str = "",
        disk_settings: DiskSettings | None = None,
        max_tokens: int | None = None,
        on_opened: Callable[[], None] = lambda: None,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """The segment in `folder` gets `size` bytes, or that of `max_tokens` tokens if less.

        `host_id` defaults to that of the folder. `on_opened` is called when the segment exists,
        `on_changed` when blocks were inserted in the index or removed.
        """
        self.incarnation = mint_id(64)
        self.host_id = host_id or compute_host_id(folder)
        self.cache_journal = CacheJournal()
        # Fails with the ConfigError when the segment cannot be created.
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._folder, self._size_bytes, self._make_evictor = folder, size, make_evictor
        self._disk_settings = disk_settings
        self._max_tokens = max_tokens
        self._clock = clock
        self._on_opened, self._on_changed = on_opened, on_changed
        self._open_lock = asyncio.Lock()
        self._open_pool: OpenPool | None = None
        self._closed = False
        self._attachment_numbers = count(1)
        self._fence_bytes: dict[PoolClientId, int] = {}  # of the fence file, by attachment
        self._removal_timer: asyncio.TimerHandle | None = None
        self._log = log.get_logger("pool")

    @property
    def open_pool(self) -> OpenPool:
        """The parts of the pool. Raises StaleMessage until the first client has attached."""
        if self._open_pool is None:
            raise StaleMessage("the pool has no segment yet")
        return self._open_pool

    async def attach_client(self, request: AttachRequest) -> PoolClientSession:
        """Attach a node; the first one also opens the pool.

        Raises LayoutMismatch for another host, model or layout. Raises ConfigError when the folder
        cannot hold the segment; then `failure` is set, too.
        """
        request.validate()
        _require_same("protocol_version", request.protocol_version, POOL_PROTOCOL_VERSION)
        _require_same("host_id", request.host_id, self.host_id)
        async with self._open_lock:
            if self._open_pool is None:
                await self._open_segment(request)
        pool = self.open_pool
        _require_same("model_digest", request.model_digest, pool.model_digest)
        request.layout.require_equal(pool.layout, f"node {request.node}")
        self._remove_ended_clients()
        client_id = PoolClientId(
            f"{request.node}/{request.incarnation[:8]}/{next(self._attachment_numbers)}"
        )
        fence_byte = pool.store.fences.allocate_byte()
        pool.block_pool.attachments.attach_client(client_id, self._clock())
        self._fence_bytes[client_id] = fence_byte
        self._log.info("node attached", client_id=client_id)
        return PoolClientSession(pool, client_id, fence_byte, self._clock)

    def on_stream_ended(self, session: PoolClientSession) -> None:
        """Handle the end of a stream; the fence byte tells when the attachment has ended."""
        pool = self.open_pool
        pool.block_pool.attachments.mark_suspect(session.client_id, self._clock())
        pool.pending_publications.remove_publisher(session.client_id)
        self._remove_ended_clients()

    async def close(self) -> None:
        self._closed = True
        if self._removal_timer is not None:
            self._removal_timer.cancel()
        if self._open_pool is not None:
            await self._open_pool.close()

    async def _open_segment(self, first_client: AttachRequest) -> None:
        size, layout = self._size_bytes, first_client.layout
        if self._max_tokens is not None:
            size = min(size, self._max_tokens * layout.token_bytes)
        try:
            store = await make_store(self._folder, size, layout, lambda: not self._closed)
        except ConfigError as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise
        self._open_pool = OpenPool(
            first_client,
            store,
            self._disk_settings,
            self._make_evictor,
            self._clock,
            self.cache_journal,
            self._on_changed,
        )
        self._log.info(
            "segment created",
            segment=store.name,
            blocks=len(store.rows),
            block_bytes=layout.block_bytes,
        )
        self._on_opened()

    def _remove_ended_clients(self) -> None:
        """Try to lock the fence byte of each suspect client, and remove those that have ended.

        For the others it is tried again after RETRY_SECONDS.
        """
        if self._closed:
            return
        pool = self.open_pool
        for client_id in pool.block_pool.attachments.suspect_clients:
            if pool.store.fences.try_close_byte(self._fence_bytes[client_id]):
                del self._fence_bytes[client_id]
                pool.block_pool.remove_client(client_id)
                self._log.info("node detached", client_id=client_id)
        if pool.block_pool.attachments.suspect_clients and self._removal_timer is None:
            self._removal_timer = asyncio.get_running_loop().call_later(
                RETRY_SECONDS, self._retry_removal
            )

    def _retry_removal(self) -> None:
        self._removal_timer = None
        self._remove_ended_clients()


def _require_same(field: str, requested: object, own: object) -> None:
    if requested != own:
        raise LayoutMismatch(f"{field} is {requested!r}, the pool has {own!r}")
