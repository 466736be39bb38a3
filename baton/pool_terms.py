"""What a node and its host's pool tell each other about blocks, as plain values."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.block_hash import BlockHash
from baton.types import BlockIndex, PeerAddress


@dataclass(frozen=True, slots=True)
class PoolPin:
    """The right to read what a look-up found, until it is released. `attachment` counts the node's attachments;
    `number` is the pool's."""

    attachment: int
    number: int


@dataclass(frozen=True, slots=True)
class PoolHit:
    """Full blocks 0, 1, ... of a chain by their global block indices, and the block that goes on from there with how
    many of its first tokens agree. `pin` is None exactly if there is neither. The last `remote` of the blocks have come
    from another host's pool for this look-up."""

    pin: PoolPin | None
    blocks: tuple[BlockIndex, ...]
    partial: tuple[BlockIndex, int] | None = None
    remote: int = 0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another host's pool that seems to have the first `tokens` of a context, which is more than there is on this host.
    Its endpoint is the HOST:PORT where it answers. Computing one of the tokens that lack here takes `token_seconds` on
    the node that is to compute them, as far as is known."""

    pool: PeerAddress
    tokens: int
    token_seconds: float


@dataclass(frozen=True, slots=True)
class Publish:
    """Full blocks of a chain, to be copied into the pool. `names` (32 bytes a block) and `tokens` (packed) are those of
    the whole chain up to the last block to publish; `sources` are the own blocks of its blocks `first` and following,
    on which the caller holds references until `then` is called, once, on the event loop: with the chain's blocks in the
    pool, pinned, or with None if they were not published. `paced`: it keeps to a rate and goes last."""

    root: BlockHash
    names: bytes
    tokens: bytes
    first: int
    sources: tuple[int, ...]
    then: Callable[[PoolHit | None], None]
    paced: bool = False
