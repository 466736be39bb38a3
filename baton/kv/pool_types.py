"""What a node and its host's pool tell each other about blocks, as plain values."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.kv.block_hash import BlockHash
from baton.types import BlockIndex, PeerAddress


@dataclass(frozen=True, slots=True)
class PoolPin:
    """The right to read what a look-up found, until it is released. `attachment_number` counts the
    node's attachments; `pin_number` is the pool's."""

    attachment_number: int
    pin_number: int


@dataclass(frozen=True, slots=True)
class PoolHit:
    """Full blocks 0, 1, ... of a chain by their global block indices, and the block that goes on
    from there with how many of its first tokens agree. `pin` is None exactly if there is neither.
    The last `remote_blocks` of the blocks have come from another host's pool for this look-up."""

    pin: PoolPin | None
    blocks: tuple[BlockIndex, ...]
    partial_block: tuple[BlockIndex, int] | None = None
    remote_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """Another host's pool that seems to have the first `prefix_tokens` of a context, which is more
    than there is on this host. Its endpoint is the HOST:PORT where it answers. Computing one of the
    tokens that lack here takes `compute_seconds_per_token` on the node that is to compute them, as
    far as is known."""

    pool: PeerAddress
    prefix_tokens: int
    compute_seconds_per_token: float


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Full blocks of a chain, to be copied into the pool. `packed_hashes` (32 bytes a block) and
    `packed_tokens` (packed) are those of the whole chain up to the last block to publish;
    `source_blocks` are the own blocks of its blocks `first_block` and following, on which the
    caller holds references until `on_done` is called, once, on the event loop: with the chain's
    blocks in the pool, pinned, or with None if they were not published. `is_rate_limited`: it keeps
    to a rate and goes last."""

    root_hash: BlockHash
    packed_hashes: bytes
    packed_tokens: bytes
    first_block: int
    source_blocks: tuple[int, ...]
    on_done: Callable[[PoolHit | None], None]
    is_rate_limited: bool = False
