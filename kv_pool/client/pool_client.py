"""A node's side of the pool: attach, look up, publish, and attach again when the pool is gone.

    dial -> AttachPool -> Attached: lock the byte, map the segment -> questions ... -> broken -> dial again after RETRY
                       -> refused: the pool serves another model; dialled again, and said once

What a pool does or lacks is never an error of the node's: a look-up is a miss, a publication is
dropped.
"""

import asyncio
import contextlib
from collections.abc import Callable

from baton.cluster_link.pb_conversion import layout_to_pb, remote_prefix_to_pb
from baton.errors import BatonError, PeerUnreachable, ShuttingDown
from baton.kv.block_hash import BlockHash
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest, RemotePrefix
from baton.pb import pool_pb2 as pb
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.shared_memory.addressing import BlockAddressSpace
from baton.types import mint_id
from kv_pool.client.attachment import POOL_MISS, PoolAttachment, SegmentMappings
from kv_pool.client.connection import PoolConnection
from kv_pool.client.prefix_lookup import PrefixLookup
from kv_pool.client.publisher import Publisher, PublishJob
from kv_pool.client.stream import PoolStream
from kv_pool.common.grpc_link import PoolDialer
from kv_pool.common.protocol import (
    ATTACH_TIMEOUT_SECONDS,
    LATE_PUBLICATION_SECONDS,
    MAX_REFUSED_RETRY_SECONDS,
    POOL_PROTOCOL_VERSION,
    RETRY_SECONDS,
    PoolClientConfig,
)
from kv_pool.core.client.redial_backoff import RedialBackoff

_GOODBYE_TIMEOUT_SECONDS = 1.0  # seconds
_TRANSIENT_ERRORS = (
    PeerUnreachable,
    ShuttingDown,
    TimeoutError,
)  # and perhaps back at any moment; everything else is a refusal


class PoolClient:
    """`run` belongs to an event loop; everything else may be called from any thread, and returns at
    once. `own` is the node's arena; the pool's segment is mapped in `space`."""

    def __init__(
        self,
        config: PoolClientConfig,
        space: BlockAddressSpace,
        own: memoryview,
        *,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._config = config
        self._segment_mappings = SegmentMappings(
            space, config.segment_folder, config.layout.block_bytes
        )
        self._clock = clock
        self._incarnation = mint_id(64)
        self._num_attachments = self._num_dials = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: PoolConnection | None = None
        self._connections: dict[
            int, PoolConnection
        ] = {}  # by number of the attachment: those that are still used, too
        self._last_complaint = ""
        self._redial_backoff = RedialBackoff(RETRY_SECONDS, MAX_REFUSED_RETRY_SECONDS)
        self._redial_seconds = RETRY_SECONDS
        self._counters: dict[str, float] = {}
        self._publisher = Publisher(
            own,
            config.layout,
            config.paced_bytes_per_second,
            line=lambda: self._connection,
            conclude=self._on_publication_ended,
            soon=self._call_on_loop,
            clock=clock,
        )
        self._log = log.get_logger("pool")

    @property
    def is_attached(self) -> bool:
        return self._connection is not None

    async def run(self) -> None:
        """Until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._publisher.start()
        try:
            dialer = await asyncio.to_thread(PoolDialer, self._config.token)
            while True:
                self._num_dials += 1
                try:
                    async with dialer.open_channel(self._config.address) as channel:
                        await self._run_stream(PoolStream(channel))
                except (
                    Exception
                ) as error:  # a defect costs this attachment, not all that would follow
                    self._log.error(
                        "attaching failed",
                        kind=type(error).__name__,
                        places=log.get_traceback_places(error),
                    )
                    self._redial_seconds = self._redial_backoff.delay_after_refusal()
                await asyncio.sleep(self._redial_seconds)  # a redial's pause, not a poll
        finally:
            await asyncio.to_thread(self._publisher.close)

    def find_prefix(
        self,
        root: BlockHash,
        names: bytes,
        tokens: bytes,
        max_tokens: int,
        then: Callable[[PoolHit], None],
        *,
        partial: bool = True,
        token_seconds: float | None = None,
        elsewhere: RemotePrefix | None = None,
    ) -> None:
        """Look a prompt up: `names` and `tokens` as in kv_pool/core/index/prompt_chain.py;
        `token_seconds` is what this node takes to compute a token of a prompt, if it knows;
        `elsewhere` is another host's pool that may have more. `then` is called once, on the loop:
        within `find_patience`, or, if more is on its way to the pool's memory, by when computing
        that would have been as quick, but within LOAD_PATIENCE."""
        chain = pb.Chain(root=root, names=names, tokens=tokens)
        find = pb.FindPrefix(
            chain=chain,
            max_tokens=max_tokens,
            partial=partial,
            token_seconds=token_seconds or 0.0,
            elsewhere=remote_prefix_to_pb(elsewhere),
        )
        self._call_on_loop(lambda: self._start_lookup(pb.PoolQuestion(find=find), then))

    def release_pin(self, pin: PoolPin) -> None:
        """Nothing that it pins is read any more. Raises ValueError for a pin that is not held."""
        line = self._connections.get(pin.attachment_number)
        if line is None:
            raise ValueError(f"{pin} is released and not held")
        line.release_pin(pin)
        if line.attachment.is_unmapped:
            self._connections.pop(pin.attachment_number, None)

    def publish_blocks(self, job: PublishRequest) -> bool:
        """False: it is dropped, and `job.then` is not called."""
        taken = self.is_attached and self._publisher.add_request(job)
        if not taken:
            self._count("baton_pool_publish_dropped_total")
        return taken

    def counters(self) -> dict[str, float]:
        return self._counters | {
            "baton_pool_published_blocks_total": float(self._publisher.written_blocks),
            "baton_pool_attachments_total": float(self._num_attachments),
            "baton_pool_dials_total": float(self._num_dials),
        }

    # attaching

    async def _run_stream(self, session: PoolStream) -> None:
        """One stream, to its end."""
        running = asyncio.create_task(session.run())
        self._redial_seconds = self._redial_backoff.delay_after_disconnect()
        try:
            line = await self._attach(session)
            if line is None:
                return
            self._connection = line
            self._log.info("attached to the pool", attachment=line.attachment.number)
            self._last_complaint = ""
            self._redial_backoff.reset()
            await asyncio.wait({running})
        except asyncio.CancelledError:
            await self._send_goodbye(session)
            raise
        finally:
            self._drop_connection()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _attach(self, session: PoolStream) -> PoolConnection | None:
        config = self._config
        question = pb.AttachPool(
            protocol_version=POOL_PROTOCOL_VERSION,
            node=config.node,
            incarnation=self._incarnation,
            host_id=config.host_id,
            model_digest=config.model_digest,
            layout=layout_to_pb(config.layout),
        )
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_SECONDS):
                answer = await session.send_question(pb.PoolQuestion(attach=question))
            number = self._num_attachments = self._num_attachments + 1
            attachment = await asyncio.to_thread(
                PoolAttachment, number, answer.attached, self._segment_mappings
            )
        except (BatonError, TimeoutError) as error:
            reason = str(error) or f"no answer within {ATTACH_TIMEOUT_SECONDS:g} s"
            if reason != self._last_complaint:  # once, as long as it stays the same
                self._log.warning("no pool", address=config.address, reason=reason)
            self._last_complaint = reason
            if not isinstance(error, _TRANSIENT_ERRORS):
                self._redial_seconds = self._redial_backoff.delay_after_refusal()
            return None
        for old in [
            one for one, line in list(self._connections.items()) if line.attachment.is_unmapped
        ]:
            self._connections.pop(old, None)  # whose last user was a publication
        line = self._connections[number] = PoolConnection(
            session, attachment, asyncio.get_running_loop()
        )
        return line

    def _drop_connection(self) -> None:
        line, self._connection = self._connection, None
        if line is not None:
            if line.attachment.detach():
                self._connections.pop(line.attachment.number, None)
            self._log.warning("the pool is gone, or gives this node up")

    async def _send_goodbye(self, session: PoolStream) -> None:
        """With a word, if nothing of the pool's is used here any more."""
        line, self._connection = self._connection, None
        if line is not None and line.attachment.detach():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_TIMEOUT_SECONDS):
                    await session.send_goodbye()

    # looking up, on the loop

    def _start_lookup(self, question: pb.PoolQuestion, then: Callable[[PoolHit], None]) -> None:
        line = self._connection
        if line is None:
            then(POOL_MISS)
            return
        PrefixLookup(line, question, then, self._count, self._config.lookup_timeout_seconds)

    # publishing, on the loop

    def _on_publication_ended(self, job: PublishJob, hit: PoolHit | None) -> None:
        if hit is None:
            self._count("baton_pool_publish_failed_total")
        else:
            lag = self._clock() - job.queued_at
            self._count("baton_pool_publications_total")
            self._count("baton_pool_publish_lag_seconds_total", lag)
            self._count("baton_pool_publications_late_total", lag > LATE_PUBLICATION_SECONDS)
        job.request.on_done(hit)

    # inside

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            call()
        else:
            loop.call_soon_threadsafe(call)

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount
