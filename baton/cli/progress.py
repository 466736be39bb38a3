"""One line that changes: in place on a terminal, a line for each change elsewhere."""

from types import TracebackType
from typing import Self, TextIO


class Progress:
    """`stream` None shows nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._in_place = stream is not None and stream.isatty()
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None and self._in_place and self._last:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def show(self, line: str) -> None:
        if self._stream is None or line == self._last:
            return
        self._last = line
        self._stream.write(f"\r\x1b[K{line}" if self._in_place else f"{line}\n")
        self._stream.flush()
