"""Publishing: a thread of its own copies a node's blocks into places that the pool gives, and
nobody waits for it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import BatonError, PeerUnreachable
from baton.kv.block_hash import HASH_BYTES, TOKEN_BYTES
from baton.kv.kv_layout import KVLayout
from baton.kv.pool_types import PoolHit, PublishRequest
from baton.pb import pool_pb2 as pb
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS, FailpointAction
from kv_pool.client.connection import PoolConnection
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.client.publish_queue import PublishQueue

_MAX_JOBS = 256
_PIECE_BYTES = 64 << 20  # bytes published at once: what has been copied is found before the rest is

OnConcluded = Callable[["PublishJob", PoolHit | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class PublishJob:
    """`queued_at`: when it came. `written` is how many blocks it has put into the pool, in the
    end."""

    request: PublishRequest
    queued_at: float

    @property
    def end_block(self) -> int:
        return len(self.request.packed_hashes) // HASH_BYTES


class Publisher:
    """`own` is the node's arena. `line` is asked for the current one before each job. `conclude` is
    called on the loop, once for each job; `soon` is how to get there."""

    def __init__(
        self,
        own: memoryview,
        layout: KVLayout,
        rate: float,
        line: Callable[[], PoolConnection | None],
        conclude: OnConcluded,
        soon: Callable[[Callable[[], None]], None],
        clock: Clock,
    ) -> None:
        self._own_rows = BlockRows(own, layout.block_bytes)
        self._layout = layout
        self._blocks_per_piece = max(1, _PIECE_BYTES // layout.block_bytes)
        self._queue: PublishQueue[PublishJob] = PublishQueue(_MAX_JOBS, rate)
        self._get_connection = line
        self._on_concluded = conclude
        self._call_on_loop = soon
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._written_blocks = 0
        self._thread = threading.Thread(target=self._run, name="pool-publisher", daemon=True)
        self._log = log.get_logger("publisher")

    @property
    def written_blocks(self) -> int:
        """Blocks so far."""
        return self._written_blocks

    def start(self) -> None:
        self._thread.start()

    def add_request(self, order: PublishRequest) -> bool:
        """From any thread. False if there is no room."""
        size = len(order.source_blocks) * self._layout.block_bytes
        with self._changed:
            taken = not self._closing and self._queue.add_job(
                PublishJob(order, self._clock()), size, paced=order.is_rate_limited
            )
            self._changed.notify()
        return taken

    def close(self) -> None:
        """Let the block that is being copied end, and the thread with it. It waits for nothing if
        its line is over."""
        with self._changed:
            self._closing = True
            dropped = self._queue.clear()
            self._changed.notify()
        for job in dropped:
            self._conclude_job(job, None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            line = self._get_connection()
            rows = line.attachment.begin_copying() if line is not None else None
            if line is None or rows is None:
                self._conclude_job(job, None)
                continue
            try:
                _PublishTask(
                    self._own_rows, self._blocks_per_piece, self._on_concluded, job, line, rows
                ).run(self._count_written)
            except BatonError as error:
                self._log.info("not published", code=error.code, reason=error.message)
                self._conclude_job(job, None)
            except Exception as error:  # a defect costs this publication, not all that would follow
                self._log.error(
                    "publishing failed",
                    kind=type(error).__name__,
                    places=log.get_traceback_places(error),
                )
                self._conclude_job(job, None)
            finally:
                del rows  # the mapping goes with its last user
                line.attachment.end_copying()

    def _next_job(self) -> PublishJob | None:
        with self._changed:
            while not self._closing:
                job = self._queue.take_ready_job(self._clock())
                if job is not None:
                    return job
                self._changed.wait(self._queue.seconds_until_ready(self._clock()))
        return None

    def _count_written(self, blocks: int) -> None:
        self._written_blocks += blocks

    def _conclude_job(self, job: PublishJob, hit: PoolHit | None) -> None:
        self._call_on_loop(lambda: self._on_concluded(job, hit))


class _PublishTask:
    """One job on its way, piece by piece."""

    def __init__(
        self,
        own: BlockRows,
        piece: int,
        conclude: OnConcluded,
        job: PublishJob,
        line: PoolConnection,
        rows: BlockRows,
    ) -> None:
        self._own_rows = own
        self._blocks_per_piece = piece
        self._on_concluded = conclude
        self._job = job
        self._connection = line
        self._pool_rows = rows
        self._held_hit: PoolHit | None = (
            None  # what is published so far, pinned so that the rest can follow
        )

    def run(self, count: Callable[[int], None]) -> None:
        """Concludes the job, or raises."""
        try:
            upto = self._job.request.first_block
            while upto < self._job.end_block:
                upto = min(upto + self._blocks_per_piece, self._job.end_block)
                granted = self._connection.send_and_wait(
                    self._reserve_question(upto), lambda answer: answer.granted
                )
                if granted.publication:
                    written = granted.first + len(granted.blocks)
                    self._copy_and_seal(granted, last=written < upto or upto == self._job.end_block)
                    count(len(granted.blocks))
                    if written < upto:
                        return
                elif granted.first < upto:  # no room, or what precedes is gone
                    return self._conclude_early()
                elif upto == self._job.end_block:
                    return self._find_published()
        except Exception:  # of whatever kind: a pin that nobody names again would stay for ever
            self._release_held()
            raise

    def _reserve_question(self, upto: int) -> pb.PoolQuestion:
        reserve = pb.ReservePlaces(chain=self._chain(upto), first=self._job.request.first_block)
        return pb.PoolQuestion(reserve=reserve)

    def _chain(self, upto: int) -> pb.Chain:
        order = self._job.request
        tokens = len(order.packed_tokens) // self._job.end_block
        return pb.Chain(
            root=order.root_hash,
            names=order.packed_hashes[: upto * HASH_BYTES],
            tokens=order.packed_tokens[: upto * tokens],
        )

    def _copy_and_seal(self, granted: pb.Granted, *, last: bool) -> None:
        checksums = []
        try:
            for number, block in enumerate(granted.blocks, granted.first):
                checksums.append(self._copy_block(number, block))
        except Exception:  # of whatever kind: the pool would keep the places until this node ends
            self._connection.send_oneway(
                pb.PoolQuestion(withdraw={"publication": granted.publication})
            )
            raise
        question = pb.PoolQuestion(
            seal={"publication": granted.publication, "checksums": checksums}
        )
        self._send_and_hold(question, last=last)

    def _copy_block(self, number: int, block: int) -> int:
        """The checksum of what was to be copied."""
        action = FAILPOINTS.hit("pool.copy.before")
        if self._connection.attachment.is_detached:
            raise PeerUnreachable("the attachment is over")
        source = self._job.request.source_blocks[number - self._job.request.first_block]
        self._pool_rows.copy_block(block, self._own_rows, source)
        if action is FailpointAction.CORRUPT:
            self._pool_rows.flip_bit(block)
        return self._own_rows.checksum(source)

    def _find_published(self) -> None:
        """Others have published all of it."""
        tokens = len(self._job.request.packed_tokens) // TOKEN_BYTES
        find = pb.FindPrefix(chain=self._chain(self._job.end_block), max_tokens=tokens)
        self._send_and_hold(pb.PoolQuestion(find=find), last=True)

    def _conclude_early(self) -> None:
        """What is published is published."""
        held, self._held_hit = self._held_hit, None
        self._connection.call_on_loop(lambda: self._on_concluded(self._job, held))

    def _send_and_hold(self, question: pb.PoolQuestion, *, last: bool) -> None:
        hit = self._connection.send_and_wait(
            question, lambda answer: self._on_answer(answer, last=last)
        )
        self._release_held()
        self._held_hit = None if last else hit

    def _on_answer(self, answer: pb.PoolAnswer, *, last: bool) -> PoolHit:
        """On the loop."""
        hit = self._connection.attachment.register_hit(answer.found)
        if last:
            self._on_concluded(self._job, hit if hit.blocks else None)
        return hit

    def _release_held(self) -> None:
        if self._held_hit is not None and self._held_hit.pin is not None:
            self._connection.release_pin(self._held_hit.pin)
        self._held_hit = None
