"""The counter-based random number generator Philox4x32-10, over vectors of counters.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
The noise at a counter is a pure function of counter and key, so no generator state has to be kept
between steps or sent between nodes.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # 32-bit words in 64 bits each, so that products are exact

_MULTIPLY_FIRST, _MULTIPLY_THIRD = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_HIGH = np.uint64(32)
WORD_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Words, Words, Words, Words],  # four words, all [n]
    key: tuple[int, int],  # two words
) -> tuple[Words, Words, Words, Words]:  # four words, all [n]
    """Four independent uniform words per counter."""
    first, second, third, fourth = counter
    low = np.uint64(WORD_MASK)
    for turn in range(_ROUNDS):
        keys = [
            np.uint64((word + turn * step) & WORD_MASK)
            for word, step in zip(key, _KEY_STEPS, strict=True)
        ]
        product, other = first * _MULTIPLY_FIRST, third * _MULTIPLY_THIRD
        first = (other >> _HIGH) ^ second ^ keys[0]
        third = (product >> _HIGH) ^ fourth ^ keys[1]
        second, fourth = other & low, product & low
    return first, second, third, fourth
