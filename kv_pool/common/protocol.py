"""Constants and data that a pool shares with its clients and with other pools."""

from dataclasses import dataclass
from pathlib import Path

from baton.kv.blocks import KVLayout
from baton.types import NodeName

POOL_PROTOCOL_VERSION = 1
PEER_PROTOCOL_VERSION = 1  # between pools
MAX_LOAD_WAIT_SECONDS = 5.0  # a look-up waits at most so long for pending blocks
REMOTE_TIER = "remote"  # tier of blocks that come from another host's pool
# Between two attempts to attach, and between two attempts to show that an attachment has ended.
RETRY_SECONDS = 0.2
MAX_REFUSED_RETRY_SECONDS = 10.0  # longest delay before dialling a pool that refuses the node
LATE_PUBLICATION_SECONDS = 1.0  # a publication that takes longer is counted as late
# Until the first answer: the pool creates its segment when the first node attaches.
ATTACH_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """A pool as other pools see it."""

    name: NodeName
    host_id: str
    segment_name: str
    model_digest: str  # hex
    layout: KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClientConfig:
    """What a node's pool client needs to know of the node and of the pool."""

    address: str  # of the pool, HOST:PORT
    token: str  # the cluster token
    node: str  # name of the node
    host_id: str
    model_digest: str  # hex
    layout: KVLayout
    segment_folder: Path
    lookup_timeout_seconds: float  # without an answer until then, a look-up is a miss
    paced_bytes_per_second: float = 256.0 * (1 << 20)  # of publications that are rate limited
