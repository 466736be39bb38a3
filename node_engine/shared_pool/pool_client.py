"""The protocol of a node's client of its host's shared pool; launchers supply an implementation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.config.settings import Config
from baton.kv.block_hash import BlockHash
from baton.kv.kv_layout import KVLayout
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest, RemotePrefix
from baton.shared_memory.addressing import BlockAddressSpace


class SharedPoolClient(Protocol):
    """A node's connection to the shared pool.

    All methods but `run` may be called from any thread, return at once, and do not raise when the
    pool fails. Callbacks run on the event loop, in the order of the pool's answers.
    """

    @property
    def is_attached(self) -> bool: ...

    async def run(self) -> None:
        """Stay attached to the pool, reconnecting when necessary, until cancelled."""
        ...

    def find_prefix(
        self,
        root_hash: BlockHash,
        packed_hashes: bytes,
        packed_tokens: bytes,
        max_tokens: int,
        on_done: Callable[[PoolHit], None],
        *,
        token_seconds: float | None = None,
        elsewhere: RemotePrefix | None = None,
    ) -> None:
        """Find the longest prefix of a chain that the pool has, at most `max_tokens` long.

        `on_done` is called once, within a time limit; a late answer or no pool counts as a miss. If
        the pool is loading more of the prefix, the look-up waits for it while computing it, at
        `token_seconds` per token, would take longer.
        """
        ...

    def release_pin(self, pin: PoolPin) -> None:
        """Release a pin that a look-up or a publication returned; call it once for each pin."""
        ...

    def publish_blocks(self, request: PublishRequest) -> bool:
        """Queue a copy of blocks into the pool. False: refused, its callback will not be called."""
        ...

    def counters(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class PoolClientContext:
    """What a node gives to the factory of its pool client."""

    config: Config
    name: str
    host_id: str
    model_digest: bytes
    layout: KVLayout
    address_space: BlockAddressSpace  # where the client maps the pool's segment
    own_arena: memoryview  # the node's arena, mapped there already: the source of publications


PoolClientFactory = Callable[[PoolClientContext], SharedPoolClient]
