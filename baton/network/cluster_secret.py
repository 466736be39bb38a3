"""Derives secrets from the cluster token, one for each purpose."""

import hashlib
from functools import lru_cache

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand


def derive_secret(token: str, purpose: bytes, size: int) -> bytes:
    """Return `size` bytes that reveal neither the token nor another secret (HKDF, RFC 5869)."""
    return HKDFExpand(algorithm=SHA256(), length=size, info=purpose).derive(_stretch_token(token))


@lru_cache(maxsize=8)
def _stretch_token(token: str) -> bytes:
    """Apply scrypt to the token (16 MiB, about 50 ms, once per process).

    This makes it expensive to guess a weak token from recorded traffic.
    """
    return hashlib.scrypt(token.encode(), salt=b"baton cluster v1", n=1 << 14, r=8, p=1, dklen=32)
