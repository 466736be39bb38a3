"""Publishing: a thread of its own copies a node's blocks into places that the pool gives, and nobody waits for it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton import log
from baton.block_hash import HASH_BYTES, TOKEN_BYTES
from baton.clock import Clock
from baton.errors import BatonError, PeerGone
from baton.failpoints import FAILPOINTS, Action
from baton.kv_layout import KVLayout
from baton.pb import pool_pb2 as pb
from baton.pool_terms import PoolHit, Publish
from kv_pool.block_rows import BlockRows
from kv_pool.core.publish_queue import PublishQueue
from kv_pool.line import Line

_MOST_JOBS = 256
_PIECE = 64 << 20  # bytes published at once: what has been copied is found before the rest is

Conclude = Callable[["Job", PoolHit | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """`since`: when it came. `written` is how many blocks it has put into the pool, in the end."""

    order: Publish
    since: float

    @property
    def end(self) -> int:
        return len(self.order.names) // HASH_BYTES


class Publisher:
    """`own` is the node's arena. `line` is asked for the current one before each job. `conclude` is called on the loop,
    once for each job; `soon` is how to get there."""

    def __init__(
        self,
        own: memoryview,
        layout: KVLayout,
        rate: float,
        line: Callable[[], Line | None],
        conclude: Conclude,
        soon: Callable[[Callable[[], None]], None],
        clock: Clock,
    ) -> None:
        self._own = BlockRows(own, layout.block_bytes)
        self._layout = layout
        self._piece = max(1, _PIECE // layout.block_bytes)
        self._queue: PublishQueue[Job] = PublishQueue(_MOST_JOBS, rate)
        self._line = line
        self._conclude = conclude
        self._soon = soon
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._written = 0
        self._thread = threading.Thread(target=self._run, name="pool-publisher", daemon=True)
        self._log = log.get("publisher")

    @property
    def written(self) -> int:
        """Blocks so far."""
        return self._written

    def start(self) -> None:
        self._thread.start()

    def offer(self, order: Publish) -> bool:
        """From any thread. False if there is no room."""
        size = len(order.sources) * self._layout.block_bytes
        with self._changed:
            taken = not self._closing and self._queue.offer(Job(order, self._clock()), size, paced=order.paced)
            self._changed.notify()
        return taken

    def close(self) -> None:
        """Let the block that is being copied end, and the thread with it. It waits for nothing if its line is over."""
        with self._changed:
            self._closing = True
            dropped = self._queue.clear()
            self._changed.notify()
        for job in dropped:
            self._end(job, None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            line = self._line()
            rows = line.attachment.begin_copying() if line is not None else None
            if line is None or rows is None:
                self._end(job, None)
                continue
            try:
                _Publication(self._own, self._piece, self._conclude, job, line, rows).run(self._count)
            except BatonError as error:
                self._log.info("not published", code=error.code, reason=error.message)
                self._end(job, None)
            except Exception as error:  # a defect costs this publication, not all that would follow
                self._log.error("publishing failed", kind=type(error).__name__, places=log.places(error))
                self._end(job, None)
            finally:
                del rows  # the mapping goes with its last user
                line.attachment.end_copying()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._closing:
                job = self._queue.take(self._clock())
                if job is not None:
                    return job
                self._changed.wait(self._queue.wait(self._clock()))
        return None

    def _count(self, blocks: int) -> None:
        self._written += blocks

    def _end(self, job: Job, hit: PoolHit | None) -> None:
        self._soon(lambda: self._conclude(job, hit))


class _Publication:
    """One job on its way, piece by piece."""

    def __init__(self, own: BlockRows, piece: int, conclude: Conclude, job: Job, line: Line, rows: BlockRows) -> None:
        self._own = own
        self._piece = piece
        self._conclude = conclude
        self._job = job
        self._line = line
        self._rows = rows
        self._held: PoolHit | None = None  # what is published so far, pinned so that the rest can follow

    def run(self, count: Callable[[int], None]) -> None:
        """Concludes the job, or raises."""
        try:
            upto = self._job.order.first
            while upto < self._job.end:
                upto = min(upto + self._piece, self._job.end)
                granted = self._line.ask_and_wait(self._reserve(upto), lambda answer: answer.granted)
                if granted.publication:
                    written = granted.first + len(granted.blocks)
                    self._write(granted, last=written < upto or upto == self._job.end)
                    count(len(granted.blocks))
                    if written < upto:
                        return
                elif granted.first < upto:  # no room, or what precedes is gone
                    return self._stop()
                elif upto == self._job.end:
                    return self._find()
        except Exception:  # of whatever kind: a pin that nobody names again would stay for ever
            self._let_go()
            raise

    def _reserve(self, upto: int) -> pb.PoolQuestion:
        reserve = pb.ReservePlaces(chain=self._chain(upto), first=self._job.order.first)
        return pb.PoolQuestion(reserve=reserve)

    def _chain(self, upto: int) -> pb.Chain:
        order = self._job.order
        tokens = len(order.tokens) // self._job.end
        return pb.Chain(root=order.root, names=order.names[: upto * HASH_BYTES], tokens=order.tokens[: upto * tokens])

    def _write(self, granted: pb.Granted, *, last: bool) -> None:
        checksums = []
        try:
            for number, block in enumerate(granted.blocks, granted.first):
                checksums.append(self._copy(number, block))
        except Exception:  # of whatever kind: the pool would keep the places until this node ends
            self._line.tell(pb.PoolQuestion(withdraw={"publication": granted.publication}))
            raise
        question = pb.PoolQuestion(seal={"publication": granted.publication, "checksums": checksums})
        self._ask(question, last=last)

    def _copy(self, number: int, block: int) -> int:
        """The checksum of what was to be copied."""
        action = FAILPOINTS.hit("pool.copy.before")
        if self._line.attachment.over:
            raise PeerGone("the attachment is over")
        source = self._job.order.sources[number - self._job.order.first]
        self._rows.copy(block, self._own, source)
        if action is Action.CORRUPT:
            self._rows.flip_bit(block)
        return self._own.checksum(source)

    def _find(self) -> None:
        """Others have published all of it."""
        tokens = len(self._job.order.tokens) // TOKEN_BYTES
        find = pb.FindPrefix(chain=self._chain(self._job.end), max_tokens=tokens)
        self._ask(pb.PoolQuestion(find=find), last=True)

    def _stop(self) -> None:
        """What is published is published."""
        held, self._held = self._held, None
        self._line.soon(lambda: self._conclude(self._job, held))

    def _ask(self, question: pb.PoolQuestion, *, last: bool) -> None:
        hit = self._line.ask_and_wait(question, lambda answer: self._answered(answer, last=last))
        self._let_go()
        self._held = None if last else hit

    def _answered(self, answer: pb.PoolAnswer, *, last: bool) -> PoolHit:
        """On the loop."""
        hit = self._line.attachment.hit(answer.found)
        if last:
            self._conclude(self._job, hit if hit.blocks else None)
        return hit

    def _let_go(self) -> None:
        if self._held is not None and self._held.pin is not None:
            self._line.release(self._held.pin)
        self._held = None
