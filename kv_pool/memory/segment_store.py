"""The pool's memory: the segment, its fence file, and the one thread that reads the segment.

That thread, the verifier, checks the blocks that publishers have copied and copies demoted blocks
to staging rows.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.kv.blocks import KVLayout
from baton.process.thread_priority import lower_thread_priority
from baton.shared_memory import segment as segments
from baton.shared_memory.fence import ArenaFences
from kv_pool.common.block_rows import BlockRows

MEMORY_SIZE_FLAG = "--pool-memory"


async def make_store(
    folder: Path, size: int, layout: KVLayout, should_continue: Callable[[], bool]
) -> "SegmentStore":
    """Create a SegmentStore on a thread of low priority. Raises what SegmentStore does."""
    # The thread fills the memory while the nodes serve already.
    executor = ThreadPoolExecutor(1, "pool-maker", lower_thread_priority)
    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, SegmentStore, folder, size, layout, should_continue
        )
    finally:
        executor.shutdown(wait=False)


class SegmentStore:
    """The segment of one pool, as rows of one block each."""

    def __init__(
        self,
        folder: Path,
        size: int,
        layout: KVLayout,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create and fill a segment of about `size` bytes, which may take a while.

        Raises ConfigError when the folder cannot hold it, and ShuttingDown once `should_continue`
        returns False.
        """
        num_bytes = segments.round_up_segment_bytes(size, layout.block_bytes)
        self._segment = segments.create_segment(
            folder, "pool", num_bytes, MEMORY_SIZE_FLAG, should_continue
        )
        self.fences = ArenaFences(self._segment.path)
        self.rows = BlockRows(self._segment.view, layout.block_bytes)
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="pool-verifier")

    @property
    def name(self) -> str:
        """The name of the segment."""
        return self._segment.name

    @property
    def view(self) -> memoryview:
        """The segment's memory."""
        return self._segment.view

    async def compute_checksums(self, blocks: Sequence[int]) -> list[int]:
        """Compute the checksums of blocks, on the verifier thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._verifier, lambda: [self.rows.checksum(block) for block in blocks]
        )

    async def verify_blocks(self, blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """Return whether all blocks match their checksums; reads them on the verifier thread."""
        loop = asyncio.get_running_loop()
        num_intact = await loop.run_in_executor(
            self._verifier, self.rows.count_intact, blocks, checksums
        )
        return num_intact == len(blocks)

    def run_on_verifier(self, call: Callable[[], None]) -> "asyncio.Future[None]":
        """Run `call` on the verifier thread, in the order of all its work."""
        return asyncio.get_running_loop().run_in_executor(self._verifier, call)

    def close(self) -> None:
        """Remove the segment; nodes that have mapped it keep their mapping."""
        self._verifier.shutdown()
        self.fences.close()
        self._segment.close()
