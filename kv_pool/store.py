"""The pool's memory: the segment, its fence file, and the one thread that reads back what publishers copied."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from baton import segment as segments
from baton.fence import ArenaFences
from baton.kv_layout import KVLayout
from kv_pool.block_rows import BlockRows

KNOB = "--pool-memory"


class Store:
    def __init__(self, folder: Path, size: int, layout: KVLayout) -> None:
        """Of about `size` bytes; filling it in takes a while. Raises ConfigError when the folder cannot hold it."""
        whole = segments.segment_bytes(size, layout.block_bytes)
        self._segment = segments.create(folder, "pool", whole, knob=KNOB)
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

    async def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Of what is in them now."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._verifier, lambda: [self.rows.checksum(block) for block in blocks])

    async def verified(self, blocks: Sequence[int], checksums: Sequence[int]) -> bool:
        """Whether all of them are what their checksums say. Reading takes its time, on a thread of its own."""
        loop = asyncio.get_running_loop()
        whole = await loop.run_in_executor(self._verifier, self.rows.whole, blocks, checksums)
        return whole == len(blocks)

    def close(self) -> None:
        """Those who map the segment keep it until they let go."""
        self._verifier.shutdown()
        self.fences.close()
        self._segment.close()
