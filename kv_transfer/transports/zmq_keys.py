"""Keys of the zmq links, derived from the cluster token: whoever has the token can talk and be
believed, nobody else can even begin. docs/design/0002 has the measurements behind "always
encrypted".

CurveZMQ authenticates both ends and encrypts and authenticates every frame. Decode's long-term key
pair and the writers' key pair are both functions of the token, so there are no key files to hand
out, and a key belongs to the cluster, not to a node: which node speaks is told by the incarnations
in the frames.
"""

from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85

from baton.network.cluster_secret import derive_secret


@dataclass(frozen=True, slots=True)
class CurveKeyPair:
    public: bytes  # Z85, 40 characters
    secret: bytes


@dataclass(frozen=True, slots=True)
class CurveKeys:
    decode: CurveKeyPair
    writer: CurveKeyPair


@lru_cache(maxsize=8)
def derive_curve_keys(token: str) -> CurveKeys:
    """Key pairs of a cluster."""
    seed = derive_secret(token, b"baton transfer plane v1", 64)
    return CurveKeys(decode=_pair(seed[:32]), writer=_pair(seed[32:]))


def _pair(secret: bytes) -> CurveKeyPair:
    encoded = z85.encode(secret)
    return CurveKeyPair(public=zmq.curve_public(encoded), secret=encoded)
