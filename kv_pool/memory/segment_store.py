"""The pool's memory: the segment, its fence file, and the one thread that reads it: to verify what
publishers copied, and to copy what goes to disk."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton.kv.kv_layout import KVLayout
from baton.shared_memory import segment as segments
from baton.shared_memory.fence import ArenaFences
from kv_pool.common.block_rows import BlockRows

MEMORY_SIZE_FLAG = "--pool-memory"
_NICE = 10  # of the thread that fills the memory in, while the nodes serve already


async def make_store(
    folder: Path, size: int, layout: KVLayout, wanted: Callable[[], bool]
) -> "SegmentStore":
    """A Store, made on a thread that gives way to others. Raises what Store does."""
    maker = ThreadPoolExecutor(1, thread_name_prefix="pool-maker", initializer=_lower_priority)
    try:
        return await asyncio.get_running_loop().run_in_executor(
            maker, SegmentStore, folder, size, layout, wanted
        )
    finally:
        maker.shutdown(wait=False)


def _lower_priority() -> None:
    os.setpriority(
        os.PRIO_PROCESS, threading.get_native_id(), _NICE
    )  # on Linux, of this thread alone


class SegmentStore:
    def __init__(
        self, folder: Path, size: int, layout: KVLayout, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Of about `size` bytes; filling it in takes a while. Raises ConfigError when the folder
        cannot hold it, and Draining once it is not `wanted` any more."""
        whole = segments.round_up_segment_bytes(size, layout.block_bytes)
        self._segment = segments.create_segment(folder, "pool", whole, MEMORY_SIZE_FLAG, wanted)
        self.fences = ArenaFences(self._segment.path)
        self.rows = BlockRows(self._segment.view, layout.block_bytes)
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="pool-verifier")

    @property
    def name(self) -> str:
        """Of the segment."""
        return self._segment.name

    @property
    def view(self) -> memoryview:
        """The segment's memory."""
        return self._segment.view

    async def compute_checksums(self, blocks: Sequence[int]) -> list[int]:
        """Of what is in them now."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._verifier, lambda: [self.rows.checksum(block) for block in blocks]
        )

    async def verify_blocks(self, blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """Whether all of them are what their checksums say. Reading takes its time, on a thread of
        its own."""
        loop = asyncio.get_running_loop()
        whole = await loop.run_in_executor(
            self._verifier, self.rows.count_intact, blocks, checksums
        )
        return whole == len(blocks)

    def run_on_verifier(self, call: Callable[[], None]) -> "asyncio.Future[None]":
        """After what is being verified, and before what will be."""
        return asyncio.get_running_loop().run_in_executor(self._verifier, call)

    def close(self) -> None:
        """Those who map the segment keep it until they let go."""
        self._verifier.shutdown()
        self.fences.close()
        self._segment.close()
