"""What clients ask of the pool: requests to attach and queries for prefixes."""

from dataclasses import dataclass

from baton.errors import LayoutMismatch
from baton.kv.kv_layout import DTYPE_BYTES, KVLayout
from baton.kv.pool_types import RemotePrefix
from kv_pool.core.index.prompt_chain import PromptChain


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """What a node says of itself when it attaches."""

    protocol_version: int
    node: str  # name of the node
    incarnation: str
    host_id: str
    model_digest: str  # hex
    layout: KVLayout

    def validate(self) -> None:
        """Raise LayoutMismatch for an invalid layout or node name."""
        layout = self.layout
        sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
        if layout.dtype not in DTYPE_BYTES or min(sizes) < 1:
            raise LayoutMismatch(f"{layout} is not a valid layout")
        for name in (self.node, self.incarnation):
            if not name.isprintable():
                raise LayoutMismatch(f"node name {name!r} is not printable")


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A look-up of the longest prefix of a prompt that may be read."""

    chain: PromptChain
    max_tokens: int
    wants_partial: bool = True  # also the block that continues the prefix, if it matches partly
    compute_seconds_per_token: float | None = None  # of the node that looks up; None if unknown
    remote_prefix: RemotePrefix | None = None  # another host's pool that may have a longer prefix

    @property
    def max_blocks(self) -> int:
        """How many blocks of the chain are requested, with the last one if a part of it is."""
        size = self.chain.block_size
        blocks = -(-self.max_tokens // size) if self.wants_partial else self.max_tokens // size
        return min(len(self.chain), blocks)
