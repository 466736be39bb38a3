"""Values that a node and its host's shared pool exchange about blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.kv.blocks import BlockHash
from baton.types import BlockIndex, PeerAddress


@dataclass(frozen=True, slots=True)
class PoolPin:
    """The right to read the blocks that a look-up found, until it is released."""

    attachment_number: int  # counts the node's attachments to its pool
    pin_number: int  # chosen by the pool


@dataclass(frozen=True, slots=True)
class PoolHit:
    """The blocks of a hash chain that the pool has."""

    pin: PoolPin | None  # None exactly if there are neither blocks nor a partial block
    blocks: tuple[BlockIndex, ...]  # full blocks 0, 1, ... of the chain, as global indices
    # The block that continues the chain, and how many of its first tokens match.
    partial_block: tuple[BlockIndex, int] | None = None
    remote_blocks: int = 0  # how many of `blocks` were fetched from another host for this look-up


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """Another host's pool that seems to have more of a context than this host."""

    pool: PeerAddress  # its endpoint is the HOST:PORT where the pool listens
    prefix_tokens: int  # the first so many tokens of the context
    compute_seconds_per_token: float  # estimated cost of computing a missing token on this node


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Full blocks of a hash chain, to be copied into the pool."""

    root_hash: BlockHash
    packed_hashes: bytes  # 32 bytes a block, of the whole chain up to the last block to publish
    packed_tokens: bytes  # 4 bytes a token, of the same blocks
    first_block: int  # place in the chain of the first block to publish
    # The node's blocks from `first_block` on. The caller keeps references on them until `on_done`.
    source_blocks: tuple[int, ...]
    # Called once, on the event loop: with the chain's blocks in the pool, pinned, or with None if
    # they were not published.
    on_done: Callable[[PoolHit | None], None]
    is_rate_limited: bool = False  # keeps to --pool-publish-rate, and goes after all others
