"""What both ends of a PoolLink agree on."""

from dataclasses import dataclass
from pathlib import Path

from baton.kv_layout import KVLayout
from baton.types import NodeName

PROTOCOL_VERSION = 1
PEER_PROTOCOL_VERSION = 1  # between pools
LOAD_PATIENCE = 5.0  # seconds a lookup waits at most for what is on its way to the pool's memory
REMOTE = "remote"  # the tier of what comes from another host's pool
RETRY = 0.2  # seconds between two attempts to attach, and between two to prove that an attachment is over
REFUSED_RETRY = 10.0  # seconds, at most, between two attempts to attach to a pool that refuses
LATE = 1.0  # seconds from when a publication is wanted until it is found; more is counted
FIRST_PATIENCE = 60.0  # seconds for the first answer: the pool makes its segment when its first node comes


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """A pool as other pools see it. `segment`: the name of its segment; `digest` in hex."""

    name: NodeName
    host_id: str
    segment: str
    digest: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class PoolClientConfig:
    """`address`: HOST:PORT of the pool; `token`: the cluster's; `model_digest` in hex; `find_patience`: seconds until a
    look-up is a miss."""

    address: str
    token: str
    node: str
    host_id: str
    model_digest: str
    layout: KVLayout
    segment_folder: Path
    find_patience: float
    paced_bytes_per_second: float = 256.0 * (1 << 20)
