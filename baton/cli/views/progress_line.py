"""A progress line: updated in place on a terminal, one line per change elsewhere."""

from types import TracebackType
from typing import Self, TextIO


class ProgressLine:
    """Shows the latest line on `stream`; without a stream (None) it shows nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_in_place = stream is not None and stream.isatty()
        self._last_line = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None and self._is_in_place and self._last_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def show_line(self, line: str) -> None:
        if self._stream is None or line == self._last_line:
            return
        self._last_line = line
        self._stream.write(f"\r\x1b[K{line}" if self._is_in_place else f"{line}\n")
        self._stream.flush()
