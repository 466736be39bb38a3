"""The lock that a writer holds while it writes into decode's memory."""

from typing import Protocol


class WriterLock(Protocol):
    """The right to write the blocks of one ticket."""

    def try_acquire(self) -> bool:
        """Take the lock. False when decode has fenced this writer off: it never can again."""
        ...

    def release(self) -> None:
        """Give the lock back, so that decode can fence this writer off."""
        ...


class NoLock:
    """The lock of a two-sided transport, whose writers never touch decode's memory."""

    def try_acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass
