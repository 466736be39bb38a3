"""A node's client of its host's pool: attaches, looks up, publishes, and reconnects.

    dial -> AttachPool -> Attached: lock the fence byte, map the segment -> questions ... -> lost
         ^             -> refused, for example because the pool serves another model       |
         +------------------- after a delay, see RedialBackoff ----------------------------+

A pool that is missing or fails is never an error for the node: a look-up is then a miss, and a
publication is dropped.

A look-up is answered in time, or it is a miss.
"""

import asyncio
import contextlib
from collections.abc import Callable

from baton.cluster_link.order_codec import remote_prefix_to_pb
from baton.errors import BatonError, PeerUnreachable, ShuttingDown
from baton.kv.blocks import BlockHash
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest, RemotePrefix
from baton.pb.pool_pb2 import Chain, FindPrefix, PoolAnswer, PoolQuestion
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.shared_memory.addressing import BlockAddressSpace
from baton.types import mint_id
from kv_pool.client.connection import (
    POOL_MISS,
    PoolAttachment,
    PoolConnection,
    PoolStream,
    SegmentMappings,
)
from kv_pool.client.publisher import Publisher, PublishJob
from kv_pool.common.grpc_link import PoolDialer
from kv_pool.common.protocol import (
    ATTACH_TIMEOUT_SECONDS,
    LATE_PUBLICATION_SECONDS,
    MAX_LOAD_WAIT_SECONDS,
    MAX_REFUSED_RETRY_SECONDS,
    RETRY_SECONDS,
    PoolClientConfig,
)
from kv_pool.core.client.redial_backoff import RedialBackoff

_AnswerFuture = asyncio.Future[PoolAnswer]
_GOODBYE_TIMEOUT_SECONDS = 1.0
# After these the pool may be back at any moment; every other error is a refusal.
_TRANSIENT_ERRORS = (PeerUnreachable, ShuttingDown, TimeoutError)


def make_lookup_question(
    root: BlockHash,
    packed_hashes: bytes,
    packed_tokens: bytes,
    max_tokens: int,
    *,
    partial: bool,
    token_seconds: float | None,
    remote_prefix: RemotePrefix | None,
) -> PoolQuestion:
    """Build the question of a look-up; the arguments are those of PoolClient.find_prefix."""
    return PoolQuestion(
        find=FindPrefix(
            chain=Chain(root=root, names=packed_hashes, tokens=packed_tokens),
            max_tokens=max_tokens,
            partial=partial,
            token_seconds=token_seconds or 0.0,
            elsewhere=remote_prefix_to_pb(remote_prefix),
        )
    )


class PrefixLookup:
    """One look-up, which calls `on_result` once, on the event loop.

    If the first answer says that more blocks are pending, the look-up waits for a second answer as
    long as that pays off; on a time-out the first answer is the result. Pins of answers that come
    too late are released at once.
    """

    def __init__(
        self,
        connection: PoolConnection,
        question: PoolQuestion,
        on_result: Callable[[PoolHit], None],
        count: Callable[[str], None],
        timeout_seconds: float,
    ) -> None:
        """`count` increments a metric; `timeout_seconds` is that of the first answer."""
        self._connection = connection
        self._on_result = on_result
        self._count = count
        self._is_open = True
        self._first_hit = POOL_MISS  # result of the first answer, while a second one is expected
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(
            timeout_seconds, self._on_timeout, "baton_pool_lookups_late_total"
        )
        second_answer: _AnswerFuture = self._loop.create_future()
        second_answer.add_done_callback(self._on_second_answer)
        first_answer = connection.stream.send_question(question, second_answer)
        first_answer.add_done_callback(self._on_first_answer)

    def _on_first_answer(self, answer: _AnswerFuture) -> None:
        hit = self._register_hit(answer)
        found = answer.result().found if answer.exception() is None else None
        if found is None or not found.loading or not self._is_open:
            self._finish(hit)
            return
        self._first_hit = hit
        self._timer.cancel()
        wait_seconds = min(found.patience, MAX_LOAD_WAIT_SECONDS)
        self._timer = self._loop.call_later(
            wait_seconds, self._on_timeout, "baton_pool_loads_late_total"
        )

    def _on_second_answer(self, answer: _AnswerFuture) -> None:
        hit = self._register_hit(answer)
        if self._is_open and hit.pin is None:
            self._finish(self._first_hit)
            return
        if self._is_open:
            self._release_hit(self._first_hit)
        self._finish(hit)

    def _on_timeout(self, metric: str) -> None:
        if self._is_open:
            self._count(metric)
            self._finish(self._first_hit)

    def _finish(self, hit: PoolHit) -> None:
        if not self._is_open:
            self._release_hit(hit)
            return
        self._is_open = False
        self._timer.cancel()
        self._on_result(hit)

    def _register_hit(self, answer: _AnswerFuture) -> PoolHit:
        return (
            self._connection.attachment.register_hit(answer.result().found)
            if answer.exception() is None
            else POOL_MISS
        )

    def _release_hit(self, hit: PoolHit) -> None:
        if hit.pin is not None:
            self._connection.release_pin(hit.pin)


class PoolClient:
    """A node's client of its host's pool. `run` belongs to an event loop.

    All other methods are thread-safe and return at once. The pool's segment is mapped in `space`,
    beside the node's own `arena`.
    """

    def __init__(
        self,
        config: PoolClientConfig,
        space: BlockAddressSpace,
        arena: memoryview,
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
        # By number of the attachment; includes detached ones that are still in use.
        self._connections: dict[int, PoolConnection] = {}
        self._last_error = ""  # logged once as long as it stays the same
        self._redial_backoff = RedialBackoff(RETRY_SECONDS, MAX_REFUSED_RETRY_SECONDS)
        self._redial_seconds = RETRY_SECONDS
        self._counters: dict[str, float] = {}
        self._publisher = Publisher(
            arena,
            config.layout,
            config.paced_bytes_per_second,
            get_connection=lambda: self._connection,
            on_concluded=self._on_publication_ended,
            call_on_loop=self._call_on_loop,
            clock=clock,
        )
        self._log = log.get_logger("pool")

    @property
    def is_attached(self) -> bool:
        return self._connection is not None

    async def run(self) -> None:
        """Stay attached to the pool until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._publisher.start()
        try:
            dialer = await asyncio.to_thread(PoolDialer, self._config.token)
            while True:
                self._num_dials += 1
                try:
                    async with dialer.open_channel(self._config.address) as channel:
                        await self._run_stream(PoolStream(channel))
                except Exception as error:  # a bug ends this attachment, not the later ones
                    self._log.error(
                        "pool client failed",
                        error_type=type(error).__name__,
                        traceback=log.get_traceback_frames(error),
                    )
                    self._redial_seconds = self._redial_backoff.delay_after_refusal()
                await asyncio.sleep(self._redial_seconds)  # the delay of a redial, not polling
        finally:
            await asyncio.to_thread(self._publisher.close)

    def find_prefix(
        self,
        root: BlockHash,
        packed_hashes: bytes,
        packed_tokens: bytes,
        max_tokens: int,
        on_result: Callable[[PoolHit], None],
        *,
        partial: bool = True,
        token_seconds: float | None = None,
        remote_prefix: RemotePrefix | None = None,
    ) -> None:
        """Look up the longest prefix of a prompt (see kv_pool/core/index/radix_index.py).

        `token_seconds` is the time in which this node computes a token of a prompt, None if
        unknown; `remote_prefix` names another host's pool that may have a longer one. `on_result`
        is called once, on the loop, within `lookup_timeout_seconds`; if more blocks are pending,
        after the time in which they could be computed, or MAX_LOAD_WAIT_SECONDS, at the latest.
        """
        question = make_lookup_question(
            root,
            packed_hashes,
            packed_tokens,
            max_tokens,
            partial=partial,
            token_seconds=token_seconds,
            remote_prefix=remote_prefix,
        )

        def start_lookup() -> None:
            if self._connection is None:
                on_result(POOL_MISS)
                return
            timeout = self._config.lookup_timeout_seconds
            PrefixLookup(self._connection, question, on_result, self._count, timeout)

        self._call_on_loop(start_lookup)

    def release_pin(self, pin: PoolPin) -> None:
        """Release a pin, when its blocks are not read any more.

        Raises ValueError for a pin that is not held.
        """
        connection = self._connections.get(pin.attachment_number)
        if connection is None:
            raise ValueError(f"{pin} is released and not held")
        connection.release_pin(pin)
        if connection.attachment.is_unmapped:
            self._connections.pop(pin.attachment_number, None)

    def publish_blocks(self, request: PublishRequest) -> bool:
        """Queue a publication; returns False if it is dropped, and `on_done` is not called."""
        is_queued = self.is_attached and self._publisher.add_request(request)
        if not is_queued:
            self._count("baton_pool_publish_dropped_total")
        return is_queued

    def counters(self) -> dict[str, float]:
        return self._counters | {
            "baton_pool_published_blocks_total": float(self._publisher.written_blocks),
            "baton_pool_attachments_total": float(self._num_attachments),
            "baton_pool_dials_total": float(self._num_dials),
        }

    # attaching

    async def _run_stream(self, stream: PoolStream) -> None:
        """Attach over a stream and wait until the stream ends."""
        running = asyncio.create_task(stream.run())
        self._redial_seconds = self._redial_backoff.delay_after_disconnect()
        try:
            connection = await self._attach(stream)
            if connection is None:
                return
            self._connection = connection
            self._log.info("attached to the pool", attachment_number=connection.attachment.number)
            self._last_error = ""
            self._redial_backoff.reset()
            await asyncio.wait({running})
        except asyncio.CancelledError:
            await self._send_goodbye(stream)
            raise
        finally:
            self._drop_connection()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _attach(self, stream: PoolStream) -> PoolConnection | None:
        """Attach; returns None, and logs the reason, if that fails."""
        try:
            attached = await stream.attach(self._config, self._incarnation)
            number = self._num_attachments = self._num_attachments + 1
            attachment = await asyncio.to_thread(
                PoolAttachment, number, attached, self._segment_mappings
            )
        except (BatonError, TimeoutError) as error:
            reason = str(error) or f"no answer within {ATTACH_TIMEOUT_SECONDS:g} s"
            if reason != self._last_error:
                self._log.warning(
                    "cannot attach to the pool", address=self._config.address, reason=reason
                )
            self._last_error = reason
            if not isinstance(error, _TRANSIENT_ERRORS):
                self._redial_seconds = self._redial_backoff.delay_after_refusal()
            return None
        # Connections whose last user was a publication are still listed.
        for old, connection in list(self._connections.items()):
            if connection.attachment.is_unmapped:
                self._connections.pop(old, None)
        connection = PoolConnection(stream, attachment, asyncio.get_running_loop())
        self._connections[number] = connection
        return connection

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if connection.attachment.detach():
                self._connections.pop(connection.attachment.number, None)
            self._log.warning("pool connection lost")

    async def _send_goodbye(self, stream: PoolStream) -> None:
        """Detach, with a goodbye if this node does not use the segment any more."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.attachment.detach():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_TIMEOUT_SECONDS):
                    await stream.send_goodbye()

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

    # internal

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            call()
        else:
            loop.call_soon_threadsafe(call)

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount
