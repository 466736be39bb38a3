"""Secret bytes that every process of a cluster derives from the cluster token, for one purpose
each."""

import hashlib
from functools import lru_cache

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand


def derive_secret(token: str, purpose: bytes, size: int) -> bytes:
    """`size` bytes that say nothing about the token, nor about the bytes of another purpose (RFC
    5869)."""
    return HKDFExpand(algorithm=SHA256(), length=size, info=purpose).derive(_stretch_token(token))


@lru_cache(maxsize=8)
def _stretch_token(token: str) -> bytes:
    """The token after scrypt (16 MiB, about 50 ms, once in the life of a process), so that recorded
    traffic of a cluster with a poor token is no cheap oracle for guessing it."""
    return hashlib.scrypt(token.encode(), salt=b"baton cluster v1", n=1 << 14, r=8, p=1, dklen=32)
