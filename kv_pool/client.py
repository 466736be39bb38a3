"""A node's side of the pool: attach, look up, publish, and attach again when the pool is gone.

    dial -> AttachPool -> Attached: lock the byte, map the segment -> questions ... -> broken -> dial again after RETRY
                       -> refused: the pool serves another model; dialled again, and said once

What a pool does or lacks is never an error of the node's: a look-up is a miss, a publication is dropped.
"""

import asyncio
import contextlib
from collections.abc import Callable

from baton import log
from baton.addressing import AddressSpace
from baton.block_hash import BlockHash
from baton.clock import Clock, steady
from baton.errors import BatonError, Draining, PeerGone
from baton.pb import pool_pb2 as pb
from baton.pool_terms import Elsewhere, PoolHit, PoolPin, Publish
from baton.types import mint_id
from baton.wire import elsewhere_to_pb, layout_to_pb
from kv_pool.attachment import MISS, Attachment, Mappings
from kv_pool.core.redial import Redial
from kv_pool.line import Line
from kv_pool.link import Dialer
from kv_pool.lookup import Lookup
from kv_pool.publisher import Job, Publisher
from kv_pool.session import Session
from kv_pool.terms import (
    FIRST_PATIENCE,
    LATE,
    PROTOCOL_VERSION,
    REFUSED_RETRY,
    RETRY,
    PoolClientConfig,
)

_GOODBYE_PATIENCE = 1.0  # seconds
_GONE = (PeerGone, Draining, TimeoutError)  # and perhaps back at any moment; everything else is a refusal


class PoolClient:
    """`run` belongs to an event loop; everything else may be called from any thread, and returns at once. `own` is the
    node's arena; the pool's segment is mapped in `space`."""

    def __init__(
        self, config: PoolClientConfig, space: AddressSpace, own: memoryview, *, clock: Clock = steady
    ) -> None:
        self._config = config
        self._mappings = Mappings(space, config.segment_folder, config.layout.block_bytes)
        self._clock = clock
        self._process = mint_id(64)
        self._attachments = self._dials = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: Line | None = None
        self._lines: dict[int, Line] = {}  # by number of the attachment: those that are still used, too
        self._complained = ""
        self._redial = Redial(RETRY, REFUSED_RETRY)
        self._pause = RETRY
        self._counters: dict[str, float] = {}
        self._publisher = Publisher(
            own,
            config.layout,
            config.paced_bytes_per_second,
            line=lambda: self._line,
            conclude=self._published,
            soon=self._soon,
            clock=clock,
        )
        self._log = log.get("pool")

    @property
    def attached(self) -> bool:
        return self._line is not None

    async def run(self) -> None:
        """Until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._publisher.start()
        try:
            dialer = await asyncio.to_thread(Dialer, self._config.token)
            while True:
                self._dials += 1
                try:
                    async with dialer.dial(self._config.address) as channel:
                        await self._session(Session(channel))
                except Exception as error:  # a defect costs this attachment, not all that would follow
                    self._log.error("attaching failed", kind=type(error).__name__, places=log.places(error))
                    self._pause = self._redial.refused()
                await asyncio.sleep(self._pause)  # a redial's pause, not a poll
        finally:
            await asyncio.to_thread(self._publisher.close)

    def find(
        self,
        root: BlockHash,
        names: bytes,
        tokens: bytes,
        max_tokens: int,
        then: Callable[[PoolHit], None],
        *,
        partial: bool = True,
        token_seconds: float | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Look a prompt up: `names` and `tokens` as in kv_pool/core/chain.py; `token_seconds` is what this node takes
        to compute a token of a prompt, if it knows; `elsewhere` is another host's pool that may have more. `then`
        is called once, on the loop: within `find_patience`, or, if more is on its way to the pool's memory, by when
        computing that would have been as quick, but within LOAD_PATIENCE."""
        chain = pb.Chain(root=root, names=names, tokens=tokens)
        find = pb.FindPrefix(
            chain=chain,
            max_tokens=max_tokens,
            partial=partial,
            token_seconds=token_seconds or 0.0,
            elsewhere=elsewhere_to_pb(elsewhere),
        )
        self._soon(lambda: self._find(pb.PoolQuestion(find=find), then))

    def release(self, pin: PoolPin) -> None:
        """Nothing that it pins is read any more. Raises ValueError for a pin that is not held."""
        line = self._lines.get(pin.attachment)
        if line is None:
            raise ValueError(f"{pin} is released and not held")
        line.release(pin)
        if line.attachment.ended:
            self._lines.pop(pin.attachment, None)

    def publish(self, job: Publish) -> bool:
        """False: it is dropped, and `job.then` is not called."""
        taken = self.attached and self._publisher.offer(job)
        if not taken:
            self._count("baton_pool_publish_dropped_total")
        return taken

    def counters(self) -> dict[str, float]:
        return self._counters | {
            "baton_pool_published_blocks_total": float(self._publisher.written),
            "baton_pool_attachments_total": float(self._attachments),
            "baton_pool_dials_total": float(self._dials),
        }

    # attaching

    async def _session(self, session: Session) -> None:
        """One stream, to its end."""
        running = asyncio.create_task(session.run())
        self._pause = self._redial.gone()
        try:
            line = await self._attach(session)
            if line is None:
                return
            self._line = line
            self._log.info("attached to the pool", attachment=line.attachment.number)
            self._complained = ""
            self._redial.attached()
            await asyncio.wait({running})
        except asyncio.CancelledError:
            await self._leave(session)
            raise
        finally:
            self._abandon()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _attach(self, session: Session) -> Line | None:
        config = self._config
        question = pb.AttachPool(
            protocol_version=PROTOCOL_VERSION,
            node=config.node,
            incarnation=self._process,
            host_id=config.host_id,
            model_digest=config.model_digest,
            layout=layout_to_pb(config.layout),
        )
        try:
            async with asyncio.timeout(FIRST_PATIENCE):
                answer = await session.ask(pb.PoolQuestion(attach=question))
            number = self._attachments = self._attachments + 1
            attachment = await asyncio.to_thread(Attachment, number, answer.attached, self._mappings)
        except (BatonError, TimeoutError) as error:
            reason = str(error) or f"no answer within {FIRST_PATIENCE:g} s"
            if reason != self._complained:  # once, as long as it stays the same
                self._log.warning("no pool", address=config.address, reason=reason)
            self._complained = reason
            if not isinstance(error, _GONE):
                self._pause = self._redial.refused()
            return None
        for old in [one for one, line in list(self._lines.items()) if line.attachment.ended]:
            self._lines.pop(old, None)  # whose last user was a publication
        line = self._lines[number] = Line(session, attachment, asyncio.get_running_loop())
        return line

    def _abandon(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            if line.attachment.abandon():
                self._lines.pop(line.attachment.number, None)
            self._log.warning("the pool is gone, or gives this node up")

    async def _leave(self, session: Session) -> None:
        """With a word, if nothing of the pool's is used here any more."""
        line, self._line = self._line, None
        if line is not None and line.attachment.abandon():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_PATIENCE):
                    await session.goodbye()

    # looking up, on the loop

    def _find(self, question: pb.PoolQuestion, then: Callable[[PoolHit], None]) -> None:
        line = self._line
        if line is None:
            then(MISS)
            return
        Lookup(line, question, then, self._count, self._config.find_patience)

    # publishing, on the loop

    def _published(self, job: Job, hit: PoolHit | None) -> None:
        if hit is None:
            self._count("baton_pool_publish_failed_total")
        else:
            lag = self._clock() - job.since
            self._count("baton_pool_publications_total")
            self._count("baton_pool_publish_lag_seconds_total", lag)
            self._count("baton_pool_publications_late_total", lag > LATE)
        job.order.then(hit)

    # inside

    def _soon(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            call()
        else:
            loop.call_soon_threadsafe(call)

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount
