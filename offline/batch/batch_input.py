"""The input of a batch: read twice, line by line, so that a file may be larger than memory.

The first pass gives each line a key of 8 bytes, a hash of its custom_id, and finds repeated ids.
The second pass yields the lines that are not answered yet.
"""

import os
import stat
from array import array
from collections.abc import Iterator
from itertools import islice, starmap
from pathlib import Path

import numpy as np
import xxhash

from baton.errors import ConfigError
from offline.batch.batch_lines import (
    MAX_LINE_BYTES,
    BadLine,
    BatchRequest,
    find_custom_id,
    parse_request,
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEEDS = range(8)  # of hashes: with another one, ids that had the same hash have different ones


class BatchInput:
    """The requests of one file, and which of them are answered."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read, or has a custom_id twice."""
        self._path = path
        for self._seed in _SEEDS:
            keys = array("Q", starmap(self._compute_key, self._read_lines()))
            self._keys = np.array(keys, np.uint64)
            self._order = np.argsort(self._keys, kind="stable")
            if not self._has_collision():
                break
        self._is_answered = np.zeros(len(self._keys), dtype=np.bool_)

    @property
    def num_requests(self) -> int:
        return len(self._is_answered)

    def mark_answered(self, custom_id: str | None, number: int | None) -> bool | None:
        """Note that a request is answered: the one with an id, or the bad line of a number.

        Returns whether it was before, and None if there is no such request.
        """
        key = self._make_key(custom_id, number or 0)
        place = int(np.searchsorted(self._keys, np.uint64(key), sorter=self._order))
        if place == len(self._keys) or int(self._keys[self._order[place]]) != key:
            return None
        index = self._order[place]
        before = bool(self._is_answered[index])
        self._is_answered[index] = True
        return before

    def iter_unanswered(self) -> Iterator[BatchRequest | BadLine]:
        """Yield the requests that are not marked as answered, in order.

        Raises ConfigError if the file has changed since it was read first.
        """
        lines = self._read_lines()
        for is_answered, key in zip(self._is_answered, self._keys, strict=True):
            number, line = next(lines, (0, None))
            if is_answered:
                continue
            if int(key) != self._compute_key(number, line):
                raise ConfigError(f"{self._path} has changed since it was read first: run again")
            yield _parse_line(number, line)

    def _compute_key(self, number: int, line: bytes | None) -> int:
        return self._make_key(None if line is None else find_custom_id(line), number)

    def _make_key(self, custom_id: str | None, number: int) -> int:
        """Return the key of a custom_id, or without one that of the line."""
        text = f"line {number}" if custom_id is None else f"id {custom_id}"
        return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"), self._seed)

    def _has_collision(self) -> bool:
        """Whether different ids have the same key. Raises ConfigError for a repeated id."""
        in_order = self._keys[self._order]
        same = np.flatnonzero(in_order[1:] == in_order[:-1])
        if not len(same):
            return False
        indices = self._order[same[0] : same[0] + 2].tolist()
        (first, id_of_first), (second, id_of_second) = map(self._find_request, indices)
        if id_of_first is not None and id_of_first == id_of_second:
            raise ConfigError(
                f"{self._path}: custom_id {id_of_first!r} is on line {first} and on line {second}:"
                " every line needs an id of its own"
            )
        return True

    def _find_request(self, index: int) -> tuple[int, str | None]:
        """Return the number of the line of a request, and its id."""
        number, line = next(islice(self._read_lines(), index, None))
        return number, None if line is None else find_custom_id(line)

    def _read_lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield each line that is not blank, with its number from 1; None for one too long."""
        try:
            with open(self._path, "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConfigError(f"{self._path} is not a file, and it is read twice")
                yield from _split_lines(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""))
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}") from None


def _split_lines(pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """`pieces` are lines, or parts of MAX_LINE_BYTES + 1 bytes of longer ones."""
    number = 0
    for piece in pieces:
        number += 1
        if len(piece) > MAX_LINE_BYTES and not piece.endswith(b"\n"):
            while not piece.endswith(b"\n") and (piece := next(pieces, b"")):
                pass
            yield number, None
            continue
        line = (piece.removeprefix(_BYTE_ORDER_MARK) if number == 1 else piece).strip()
        if line:
            yield number, line


def _parse_line(number: int, line: bytes | None) -> BatchRequest | BadLine:
    if line is None:
        return BadLine(number, None, f"it has more than {MAX_LINE_BYTES} bytes: shorten it")
    try:
        return parse_request(number, line)
    except BadLine as error:
        return error
