"""The one way into the compute thread: any thread puts, only the compute thread drains."""

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class ComputeInbox(Generic[T]):
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def drain(self, *, wait: bool) -> list[T]:
        """Everything that has arrived, in order. With `wait`, sleeps until there is something."""
        items: list[T] = []
        if wait:
            items.append(self._queue.get())
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items
