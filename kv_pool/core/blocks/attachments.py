"""The attachments of a pool's clients, with their pins and their unfinished publications.

An attachment is one node's mapping of the pool's segment. It is LIVE while its stream is open. When
the stream ends it becomes SUSPECT, because the process may be dead, stopped or only slow. It ends
when the client has detached or is known to have unmapped the segment; no timeout ends it.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kv_pool.core.index.path_table import ROOT
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.core.ledger import PoolLedgerError, require_invariant

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

    def pinned_blocks(self) -> Iterator[int]:
        """Every block with a pin of this attachment, once for each pin."""
        for blocks in self.pins.values():
            yield from blocks
        for publication in self.publications.values():
            if publication.parent_block != ROOT:
                yield publication.parent_block

    def num_writing_blocks(self) -> int:
        return sum(len(publication.blocks) for publication in self.publications.values())


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


class AttachmentTable:
    """All attachments. Methods raise PoolLedgerError for a client that is not attached."""

    def __init__(self) -> None:
        self._records: dict[PoolClientId, AttachmentRecord] = {}

    def __iter__(self) -> Iterator[tuple[PoolClientId, AttachmentRecord]]:
        return iter(self._records.items())

    @property
    def suspect_clients(self) -> tuple[PoolClientId, ...]:
        """Clients whose stream has ended and that may still map the segment."""
        return tuple(
            client_id
            for client_id, attachment in self._records.items()
            if attachment.state is AttachmentState.SUSPECT
        )

    @property
    def num_pins(self) -> int:
        """Pins of all clients."""
        return sum(len(attachment.pins) for attachment in self._records.values())

    def is_live(self, client_id: PoolClientId) -> bool:
        attachment = self._records.get(client_id)
        return attachment is not None and attachment.state is AttachmentState.LIVE

    def get_live(self, client_id: PoolClientId) -> AttachmentRecord:
        attachment = self._records.get(client_id)
        if attachment is None or attachment.state is not AttachmentState.LIVE:
            raise PoolLedgerError(f"{client_id} is not attached")
        return attachment

    def list_in_state(self, state: AttachmentState) -> list[AttachmentRecord]:
        return [record for record in self._records.values() if record.state is state]

    def num_unfinished_publications(self, client_id: PoolClientId) -> int:
        """Return how many publications of a client are neither sealed nor withdrawn."""
        return len(self.get_live(client_id).publications)

    def attach_client(self, client_id: PoolClientId, now: float) -> None:
        require_invariant(client_id not in self._records, f"{client_id} is attached already")
        self._records[client_id] = AttachmentRecord(now)

    def mark_suspect(self, client_id: PoolClientId, now: float) -> None:
        """Record that a client's stream has ended; its pins and publications stay."""
        self._records[client_id].state = AttachmentState.SUSPECT
        self._records[client_id].state_since = now

    def remove_client(self, client_id: PoolClientId) -> AttachmentRecord:
        return self._records.pop(client_id)
