"""Who holds what at the pool: attachments, their pins and their unfinished publications.

An attachment is one node's mapping of the segment. It is LIVE while its stream is open; then
DOUBTFUL, because its process may be dead, stopped or only slow; and it ends by its own goodbye or
by proof that it maps the segment no more. No clock ends it.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kv_pool.core.index.prompt_chain import PromptChain

PoolClientId = NewType(
    "PoolClientId", str
)  # names an attachment: node name, incarnation and number
PinId = NewType("PinId", int)
PublicationId = NewType("PublicationId", int)


class AttachmentState(Enum):
    LIVE = "live"
    SUSPECT = "doubtful"


@dataclass(frozen=True, slots=True)
class Publication:
    """Blocks `first_block`, `first_block` + 1 ... of `chain` are being written to `blocks`.
    `parent_block` is pinned meanwhile."""

    chain: PromptChain
    first_block: int
    blocks: tuple[int, ...]
    parent_block: int


@dataclass(slots=True)
class AttachmentRecord:
    """`pins`: the pinned blocks, one or two (a path's deepest, and a partly matching one), by pin.
    Moments in seconds."""

    state_since: float
    state: AttachmentState = AttachmentState.LIVE
    pins: "dict[PinId, tuple[int, ...]]" = field(default_factory=dict)
    publications: dict[PublicationId, Publication] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """The longest prefix that is in memory, pinned until `pin_id` is released: pool block numbers,
    first to last, and the block, with how many of its first tokens, that goes on from there.
    Without both, `pin_id` is None. `remote_blocks` of the blocks have come from another host's pool
    while the answer was waited for."""

    pin_id: PinId | None
    blocks: "array[int]"
    partial_block: tuple[int, int] | None = None
    remote_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PublicationGrant:
    """Write the blocks `first_block` ... of the chain to the pool blocks `blocks`, then seal. What
    precedes them is in the pool. There may be fewer than were asked for, or none: then there is no
    publication."""

    publication_id: PublicationId | None
    first_block: int
    blocks: tuple[int, ...]
