"""What both ends of a PoolLink agree on."""

from dataclasses import dataclass
from pathlib import Path

from baton.kv.kv_layout import KVLayout
from baton.types import NodeName

POOL_PROTOCOL_VERSION = 1
PEER_PROTOCOL_VERSION = 1  # between pools
MAX_LOAD_WAIT_SECONDS = (
    5.0  # seconds a lookup waits at most for what is on its way to the pool's memory
)
REMOTE_TIER = "remote"  # the tier of what comes from another host's pool
# seconds between two attempts to attach, and between two to prove that an attachment is over
RETRY_SECONDS = 0.2
MAX_REFUSED_RETRY_SECONDS = (
    10.0  # seconds, at most, between two attempts to attach to a pool that refuses
)
LATE_PUBLICATION_SECONDS = (
    1.0  # seconds from when a publication is wanted until it is found; more is counted
)
ATTACH_TIMEOUT_SECONDS = (
    60.0  # seconds for the first answer: the pool makes its segment when its first node comes
)


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """A pool as other pools see it. `segment_name`: the name of its segment; `model_digest` in
    hex."""

    name: NodeName
    host_id: str
    segment_name: str
    model_digest: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class PoolClientConfig:
    """`address`: HOST:PORT of the pool; `token`: the cluster's; `model_digest` in hex;
    `lookup_timeout_seconds`: seconds until a look-up is a miss."""

    address: str
    token: str
    node: str
    host_id: str
    model_digest: str
    layout: KVLayout
    segment_folder: Path
    lookup_timeout_seconds: float
    paced_bytes_per_second: float = 256.0 * (1 << 20)
