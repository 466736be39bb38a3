"""Keys of the zmq links, derived from the cluster token.

CurveZMQ authenticates both ends, and encrypts and authenticates every frame. Decode's long-term key
pair and the writers' key pair are both functions of the token. So there are no key files to hand
out, and a key belongs to the cluster, not to a node: the incarnations in the frames tell which node
speaks. docs/design/0002 has the measurements that led to always encrypting.
"""

from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85

from baton.network.cluster_secret import derive_secret


@dataclass(frozen=True, slots=True)
class CurveKeyPair:
    public: bytes  # Z85, 40 characters, as is the next
    secret: bytes


@dataclass(frozen=True, slots=True)
class CurveKeys:
    decode: CurveKeyPair
    writer: CurveKeyPair


@lru_cache(maxsize=8)
def derive_curve_keys(token: str) -> CurveKeys:
    """The key pairs of the cluster with this token. Takes 0.2 s the first time."""
    seed = derive_secret(token, b"baton transfer plane v1", 64)
    return CurveKeys(decode=_pair(seed[:32]), writer=_pair(seed[32:]))


def _pair(secret: bytes) -> CurveKeyPair:
    encoded = z85.encode(secret)
    return CurveKeyPair(public=zmq.curve_public(encoded), secret=encoded)
