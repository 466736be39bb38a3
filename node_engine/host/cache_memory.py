"""The memory behind the blocks of a node's arena, allocated while the node serves.

A thread of low priority allocates it, from the first block on. The compute thread does not wait for
that thread: it allocates the memory of a block itself before it first uses the block.
"""

import threading
from collections.abc import Callable

from baton.errors import ConfigError, ShuttingDown
from baton.process import log
from baton.process.failpoints import FAILPOINTS
from baton.process.thread_priority import lower_thread_priority
from baton.shared_memory.available_memory import format_size
from baton.shared_memory.segment import Segment, round_up_segment_bytes


class CacheMemory:
    """How many blocks of an arena have memory: all of them after a while."""

    def __init__(self, segment: Segment, block_bytes: int) -> None:
        self._segment = segment
        self._block_bytes = block_bytes
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._log = log.get_logger("engine")

    @property
    def num_backed_blocks(self) -> int:
        """Blocks that have memory, from block 0 on. Any thread."""
        return self._segment.memory.allocated_bytes // self._block_bytes

    def back_blocks(self, count: int) -> int:
        """Ensure that the first `count` blocks have memory. Returns how many blocks have.

        These are fewer than `count` only if the rest of the arena will never have memory. Any
        thread.
        """
        self._allocate_until(count * self._block_bytes)
        return self.num_backed_blocks

    def start_allocation(self, on_exhausted: Callable[[], None]) -> None:
        """Allocate the rest on a thread of its own.

        `on_exhausted` is called if there is not enough memory for all blocks: on that thread, or
        at once if this is known already.
        """

        def allocate() -> None:
            lower_thread_priority()  # it would otherwise slow down the first requests
            while self._is_growing():
                FAILPOINTS.hit("cache.allocate.before")
                self._allocate_until(self._segment.memory.allocated_bytes + 1)  # one piece
            if self._is_exhausted():
                on_exhausted()

        if self._is_growing():
            self._thread = threading.Thread(target=allocate, name="cache-memory", daemon=True)
            self._thread.start()
        elif self._is_exhausted():
            on_exhausted()

    def stop_allocation(self) -> None:
        """End the thread, after the piece that it is allocating. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _is_growing(self) -> bool:
        memory = self._segment.memory
        return memory.allocated_bytes < memory.max_bytes and not self._stopping.is_set()

    def _is_exhausted(self) -> bool:
        return self._segment.memory.max_bytes < self._segment.size_bytes

    def _allocate_until(self, end: int) -> None:
        try:
            self._segment.memory.allocate_until(end, lambda: not self._stopping.is_set())
        except ShuttingDown:
            pass
        except (ConfigError, OSError) as error:
            self._give_up_rest(error)

    def _give_up_rest(self, error: ConfigError | OSError) -> None:
        memory, size = self._segment.memory, self._segment.size_bytes
        with self._lock:
            is_first = memory.max_bytes == size
            memory.give_up_rest(round_up_segment_bytes(1, self._block_bytes))
        if is_first:
            self._log.warning(
                "cache is smaller than planned: other programs have used the memory",
                bytes=memory.max_bytes,
                planned=format_size(size),
                blocks=self.num_backed_blocks,
                reason=error.message if isinstance(error, ConfigError) else error.strerror,
            )
