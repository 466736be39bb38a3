"""The attachments of a pool's clients, with their pins and their unfinished publications.

An attachment is one node's mapping of the pool's segment. It is LIVE while its stream is open. When
the stream ends it becomes SUSPECT, because the process may be dead, stopped or only slow. It ends
when the client has detached or is known to have unmapped the segment; no timeout ends it.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kv_pool.core.index.prompt_chain import PromptChain

PoolClientId = NewType("PoolClientId", str)  # an attachment: node name, incarnation and number
PinId = NewType("PinId", int)
PublicationId = NewType("PublicationId", int)


class AttachmentState(Enum):
    LIVE = "live"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class Publication:
    """Blocks of a prompt that a client is writing and that are not findable yet."""

    chain: PromptChain
    first_block: int  # number in the chain of the first block that is written
    blocks: tuple[int, ...]  # pool blocks reserved for the chain's blocks from `first_block` on
    parent_block: int  # pool block before the first one, pinned until the end; ROOT if none


@dataclass(slots=True)
class AttachmentRecord:
    """What the pool records about one attachment."""

    state_since: float  # seconds
    state: AttachmentState = AttachmentState.LIVE
    # Per pin one or two pinned blocks: the deepest of a path, and a partially matching one.
    pins: "dict[PinId, tuple[int, ...]]" = field(default_factory=dict)
    publications: dict[PublicationId, Publication] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """The longest prefix of a prompt in memory, pinned until `pin_id` is released."""

    pin_id: PinId | None  # None if nothing matches
    blocks: "array[int]"  # pool blocks of the full blocks that match, first to last
    # The block that continues the prefix, and how many of its first tokens match.
    partial_block: tuple[int, int] | None = None
    remote_blocks: int = 0  # how many of `blocks` came from another host's pool for this look-up


@dataclass(frozen=True, slots=True)
class PublicationGrant:
    """Pool blocks reserved for a publication: the client writes them, then seals the publication.

    Fewer blocks than requested may be granted. If none are, there is no publication.
    """

    publication_id: PublicationId | None
    first_block: int  # number in the chain of the first granted block; all before it are in memory
    blocks: tuple[int, ...]
