"""Checksums of blocks that many programs can compute at once, in any order.

Each 64-bit word is mixed with its place and the results are added: a change of one word always
changes the sum, and two changes cancel each other with a probability of 2**-64.
"""

import numpy as np
import numpy.typing as npt

POSITION_FACTOR = 0x9E3779B97F4A7C15  # of Fibonacci hashing (Knuth, TAOCP 3, 6.4): odd


def compute_checksums(
    blocks: npt.NDArray[np.uint64],  # [n, words]
) -> npt.NDArray[np.uint64]:  # [n]
    """The checksum of each row; see `kv_kernels.triton.block_copy`."""
    places = np.arange(blocks.shape[1], dtype=np.uint64) * np.uint64(POSITION_FACTOR)
    sums: npt.NDArray[np.uint64] = _mix(blocks ^ places).sum(1, dtype=np.uint64)
    return sums


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of MurmurHash3 (Appleby, 2011): a bijection of 64-bit words."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = (words ^ (words >> np.uint64(33))) * np.uint64(factor)
    return words ^ (words >> np.uint64(33))
