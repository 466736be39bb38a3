"""Token ids of an index's blocks in one array, so that comparing a long path is one operation."""

from array import array

import numpy as np

from baton.kv.blocks import TOKEN_BYTES


class TokenTable:
    """`num_blocks` rows of `block_size` packed token ids.

    Token ids are packed as in messages, 4 bytes each, big endian, so that comparing rows as bytes
    orders them by token id.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._row_bytes = block_size * TOKEN_BYTES
        self._bytes = bytearray(num_blocks * self._row_bytes)
        self._rows = np.frombuffer(self._bytes, dtype=f"V{self._row_bytes}")

    def set_tokens(self, block: int, tokens: bytes) -> None:
        if len(tokens) != self._row_bytes:
            raise ValueError(f"{len(tokens)} bytes of tokens for a block of {self._row_bytes}")
        self._bytes[block * self._row_bytes : (block + 1) * self._row_bytes] = tokens

    def get_tokens(self, block: int) -> bytes:
        return bytes(self._bytes[block * self._row_bytes : (block + 1) * self._row_bytes])

    def count_matching_blocks(self, path: "array[int]", tokens: bytes) -> int:
        """Return how many leading blocks of `path` hold the first of the packed `tokens`."""
        rows = self._rows.take(np.frombuffer(path, dtype=np.int32))
        if rows.tobytes() == tokens[: rows.nbytes]:
            return len(path)
        same = rows.view(np.uint32) == np.frombuffer(
            tokens, dtype=np.uint32, count=rows.nbytes // TOKEN_BYTES
        )
        return int(same.reshape(len(path), -1).all(axis=1).argmin())


def common_prefix_tokens(first: bytes, second: bytes) -> int:
    """Return the length in tokens of the longest common prefix of two packed token lists."""
    length = min(len(first), len(second)) // TOKEN_BYTES
    left_ids, right_ids = (
        np.frombuffer(tokens, dtype=np.uint32, count=length) for tokens in (first, second)
    )
    differing = np.flatnonzero(left_ids != right_ids)
    return int(differing[0]) if differing.size else length
