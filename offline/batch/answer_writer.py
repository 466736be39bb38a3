"""Writes answers of a batch, and reports them as done once the disk has them.

Lines that are appended together are brought to the disk together (group commit): a second after
the first of them, or as soon as they have MAX_UNSYNCED_BYTES. A power failure loses these at most,
and none that was reported as done.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from offline.batch.batch_output import BatchOutput, OutputFailed

SYNC_SECONDS = 1.0
MAX_UNSYNCED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """What is reported of a line."""

    num_tokens: int
    is_failure: bool


class AnswerWriter:
    """Appends to an output. Used on one event loop."""

    def __init__(self, output: BatchOutput, on_durable: Callable[[WrittenAnswer], None]) -> None:
        """`on_durable` is called for each answer that the disk has."""
        self._output = output
        self._on_durable = on_durable
        self._unsynced: list[WrittenAnswer] = []
        self._num_unsynced_bytes = 0
        self._is_ending = False
        self._has_unsynced, self._is_due, self._has_room = (asyncio.Event() for _ in range(3))
        self._has_room.set()

    async def append(self, line: bytes, answer: WrittenAnswer) -> None:
        """Write a line; waits while too many bytes are not on the disk. Raises OutputFailed."""
        await self._has_room.wait()
        self._output.append(line)
        self._unsynced.append(answer)
        self._num_unsynced_bytes += len(line)
        self._has_unsynced.set()
        if self._num_unsynced_bytes >= MAX_UNSYNCED_BYTES:
            self._is_due.set()
            self._has_room.clear()

    async def run(self) -> None:
        """Bring lines to the disk, until `finish` is called. Raises OutputFailed."""
        while self._unsynced or not self._is_ending:
            await self._has_unsynced.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_SECONDS):
                    await self._is_due.wait()
            await self._sync()

    def finish(self) -> None:
        """No line follows: `run` returns when the disk has all."""
        self._is_ending = True
        self._has_unsynced.set()
        self._is_due.set()

    async def _sync(self) -> None:
        written, self._unsynced = self._unsynced, []
        self._num_unsynced_bytes = 0
        if not self._is_ending:
            self._has_unsynced.clear()
            self._is_due.clear()
        try:
            await asyncio.to_thread(self._output.sync)
        except OutputFailed:
            self._output.cut_unsynced_lines()
            raise
        if self._num_unsynced_bytes < MAX_UNSYNCED_BYTES:
            self._has_room.set()
        for answer in written:
            self._on_durable(answer)
