"""Reads the generations of several choices as one stream of events."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from coordinator.generation import FinishedEvent, Generation, GenerationEvent


async def merge_generations(
    generations: Sequence[Generation],
) -> AsyncIterator[tuple[int, GenerationEvent]]:
    """Yield (generation index, event), in order within each generation; stop at the first error.

    At most one event of each generation is buffered here; the others stay in the generations'
    bounded buffers.
    """
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GenerationEvent | Exception]] = asyncio.Queue(len(generations))
    readers = [
        asyncio.create_task(_read_generation(*numbered, queue))
        for numbered in enumerate(generations)
    ]
    left = len(readers)
    try:
        while left:
            number, read = await queue.get()
            if isinstance(read, Exception):
                raise read
            left -= isinstance(read, FinishedEvent)
            yield number, read
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read_generation(
    number: int,
    generation: Generation,
    queue: "asyncio.Queue[tuple[int, GenerationEvent | Exception]]",
) -> None:
    try:
        async for event in generation:
            await queue.put((number, event))
    except Exception as error:
        await queue.put((number, error))
