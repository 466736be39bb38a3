"""The inbox of the compute thread: any thread puts items, only the compute thread drains them."""

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class ComputeInbox(Generic[T]):
    """An unbounded thread-safe queue whose reader takes all items at once."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def drain(self, *, wait: bool) -> list[T]:
        """All items that have arrived, in order. With `wait`, blocks until there is one."""
        items: list[T] = []
        if wait:
            items.append(self._queue.get())
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items
