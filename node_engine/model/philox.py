"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), over vectors of counters.

Counter-based: the noise at a counter is a pure function of counter and key, so that nothing has to be carried from
step to step, or from node to node.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit words per counter. Words are held in int64 tensors (0 <= word < 2**32) of one shape: products wrap
    around at 64 bits, which leaves the bits right, and the mask after the shift drops the copied sign."""
    a, b, c, d = counter
    key_a, key_b = key
    for _ in range(_ROUNDS):
        low_product, high_product = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (high_product >> 32 & MASK) ^ b ^ key_a,
            high_product & MASK,
            (low_product >> 32 & MASK) ^ d ^ key_b,
            low_product & MASK,
        )
        key_a, key_b = key_a + _KEY_STEPS[0] & MASK, key_b + _KEY_STEPS[1] & MASK
    return a, b, c, d
