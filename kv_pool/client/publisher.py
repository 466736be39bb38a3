"""Publishing: a background thread copies a node's blocks to blocks that the pool grants."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import BatonError, PeerUnreachable
from baton.kv.blocks import HASH_BYTES, TOKEN_BYTES, KVLayout
from baton.kv.pool_types import PoolHit, PublishRequest
from baton.pb import pool_pb2 as pb
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS, FailpointAction
from kv_pool.client.connection import PoolConnection
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.client.publish_queue import PublishQueue

_MAX_JOBS = 256
_PIECE_BYTES = 64 << 20  # per publication, so that the first blocks are findable before the rest

# Gets a job that has ended, with its blocks in the pool, or None if they were not published.
OnConcluded = Callable[["PublishJob", PoolHit | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class PublishJob:
    """A request in the publisher's queue."""

    request: PublishRequest
    queued_at: float  # seconds

    @property
    def end_block(self) -> int:
        """The number of blocks in the chain, up to the last one to publish."""
        return len(self.request.packed_hashes) // HASH_BYTES


class Publisher:
    """Publishes the blocks of a node's arena on a thread of its own."""

    def __init__(
        self,
        arena: memoryview,
        layout: KVLayout,
        bytes_per_second: float,
        get_connection: Callable[[], PoolConnection | None],
        on_concluded: OnConcluded,
        call_on_loop: Callable[[Callable[[], None]], None],
        clock: Clock,
    ) -> None:
        """`bytes_per_second` limits paced jobs; `get_connection` is called before each job;
        `on_concluded` is called once for each job, on the loop, by way of `call_on_loop`."""
        self._own_rows = BlockRows(arena, layout.block_bytes)
        self._layout = layout
        self._blocks_per_piece = max(1, _PIECE_BYTES // layout.block_bytes)
        self._queue: PublishQueue[PublishJob] = PublishQueue(_MAX_JOBS, bytes_per_second)
        self._get_connection = get_connection
        self._on_concluded = on_concluded
        self._call_on_loop = call_on_loop
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._written_blocks = 0
        self._thread = threading.Thread(target=self._run, name="pool-publisher", daemon=True)
        self._log = log.get_logger("publisher")

    @property
    def written_blocks(self) -> int:
        """Blocks published so far."""
        return self._written_blocks

    def start(self) -> None:
        self._thread.start()

    def add_request(self, request: PublishRequest) -> bool:
        """Queue a request, from any thread; returns False if the queue is full."""
        size = len(request.source_blocks) * self._layout.block_bytes
        with self._changed:
            is_queued = not self._closing and self._queue.add_job(
                PublishJob(request, self._clock()), size, paced=request.is_rate_limited
            )
            self._changed.notify()
        return is_queued

    def close(self) -> None:
        """Drop the queue and stop the thread after the block that it is copying.

        The thread does not wait for the pool once its connection is closed.
        """
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
            connection = self._get_connection()
            rows = connection.attachment.begin_copying() if connection is not None else None
            if connection is None or rows is None:
                self._conclude_job(job, None)
                continue
            try:
                _PublishTask(
                    self._own_rows,
                    self._blocks_per_piece,
                    self._on_concluded,
                    self._count_written,
                    job,
                    connection,
                    rows,
                ).run()
            except BatonError as error:
                self._log.info("blocks not published", code=error.code, reason=error.message)
                self._conclude_job(job, None)
            except Exception as error:  # a bug fails this publication, not the later ones
                self._log.error(
                    "block publication failed",
                    error_type=type(error).__name__,
                    traceback=log.get_traceback_frames(error),
                )
                self._conclude_job(job, None)
            finally:
                del rows  # a segment is unmapped with its last user
                connection.attachment.end_copying()

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
    """One job in progress, published in pieces of limited size."""

    def __init__(
        self,
        own_rows: BlockRows,
        blocks_per_piece: int,
        on_concluded: OnConcluded,
        count_written: Callable[[int], None],
        job: PublishJob,
        connection: PoolConnection,
        pool_rows: BlockRows,
    ) -> None:
        """`count_written` gets numbers of published blocks, on the loop."""
        self._own_rows = own_rows
        self._blocks_per_piece = blocks_per_piece
        self._on_concluded = on_concluded
        self._count_written = count_written
        self._job = job
        self._connection = connection
        self._pool_rows = pool_rows
        # The blocks published so far, pinned so that later pieces can follow them.
        self._held_hit: PoolHit | None = None

    def run(self) -> None:
        """Publish the blocks and conclude the job. Raises BatonError if that is not possible."""
        try:
            end = self._job.request.first_block
            while end < self._job.end_block:
                end = min(end + self._blocks_per_piece, self._job.end_block)
                granted = self._connection.send_and_wait(
                    self._reserve_question(end), lambda answer: answer.granted
                )
                if granted.publication:
                    written = granted.first + len(granted.blocks)
                    self._copy_and_seal(granted, last=written < end or end == self._job.end_block)
                    if written < end:
                        return
                elif granted.first < end:  # no room, or a block before them was evicted
                    return self._conclude_early()
                elif end == self._job.end_block:
                    return self._find_published()
        except Exception:  # of any kind: otherwise the pin would stay until this node ends
            self._release_held()
            raise

    def _reserve_question(self, end: int) -> pb.PoolQuestion:
        reserve = pb.ReservePlaces(chain=self._chain(end), first=self._job.request.first_block)
        return pb.PoolQuestion(reserve=reserve)

    def _chain(self, end: int) -> pb.Chain:
        request = self._job.request
        block_bytes = len(request.packed_tokens) // self._job.end_block
        return pb.Chain(
            root=request.root_hash,
            names=request.packed_hashes[: end * HASH_BYTES],
            tokens=request.packed_tokens[: end * block_bytes],
        )

    def _copy_and_seal(self, granted: pb.Granted, *, last: bool) -> None:
        checksums = []
        try:
            for number, block in enumerate(granted.blocks, granted.first):
                checksums.append(self._copy_block(number, block))
        except Exception:  # of any kind: otherwise the blocks stay reserved until this node ends
            self._connection.send_oneway(
                pb.PoolQuestion(withdraw={"publication": granted.publication})
            )
            raise
        question = pb.PoolQuestion(
            seal={"publication": granted.publication, "checksums": checksums}
        )
        self._send_and_hold(question, last=last, written=len(granted.blocks))

    def _copy_block(self, number: int, block: int) -> int:
        """Copy one block to the pool; returns the checksum of the source."""
        action = FAILPOINTS.hit("pool.copy.before")
        if self._connection.attachment.is_detached:
            raise PeerUnreachable("the attachment has ended")
        source = self._job.request.source_blocks[number - self._job.request.first_block]
        self._pool_rows.copy_block(block, self._own_rows, source)
        if action is FailpointAction.CORRUPT:
            self._pool_rows.flip_bit(block)
        return self._own_rows.checksum(source)

    def _find_published(self) -> None:
        """Look up blocks that other nodes have published already, to conclude with them."""
        tokens = len(self._job.request.packed_tokens) // TOKEN_BYTES
        find = pb.FindPrefix(chain=self._chain(self._job.end_block), max_tokens=tokens)
        self._send_and_hold(pb.PoolQuestion(find=find), last=True)

    def _conclude_early(self) -> None:
        """Conclude with the blocks that are published; the rest is not."""
        held_hit, self._held_hit = self._held_hit, None
        self._connection.call_on_loop(lambda: self._on_concluded(self._job, held_hit))

    def _send_and_hold(self, question: pb.PoolQuestion, *, last: bool, written: int = 0) -> None:
        hit = self._connection.send_and_wait(
            question, lambda answer: self._on_answer(answer, last=last, written=written)
        )
        self._release_held()
        self._held_hit = None if last else hit

    def _on_answer(self, answer: pb.PoolAnswer, *, last: bool, written: int) -> PoolHit:
        """Register the pool's answer, on the loop, and conclude the job if it is the last."""
        hit = self._connection.attachment.register_hit(answer.found)
        self._count_written(written)  # before the conclusion, whose receiver may read the count
        if last:
            self._on_concluded(self._job, hit if hit.blocks else None)
        return hit

    def _release_held(self) -> None:
        if self._held_hit is not None and self._held_hit.pin is not None:
            self._connection.release_pin(self._held_hit.pin)
        self._held_hit = None
