"""Masks of grammars that a test writes down."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class FixedTokenMask:
    """A `TokenMask` that allows some tokens of a vocabulary."""

    allowed: tuple[int, ...]
    vocab_size: int

    def wait_for_words(self) -> npt.NDArray[np.int32]:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)
