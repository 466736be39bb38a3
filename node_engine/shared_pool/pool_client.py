"""What a node needs of the client of its host's shared pool. Launchers bring one; node_engine does
not know which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.config.settings import Config
from baton.kv.block_hash import BlockHash
from baton.kv.kv_layout import KVLayout
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest, RemotePrefix
from baton.shared_memory.addressing import BlockAddressSpace


class SharedPoolClient(Protocol):
    """All but `run` may be called from any thread, return at once and raise nothing for what the
    pool does. Callbacks run on the event loop, in the order in which the pool answered."""

    @property
    def is_attached(self) -> bool: ...

    async def run(self) -> None:
        """Be attached to the pool, again and again, until cancelled."""
        ...

    def find_prefix(
        self,
        root: BlockHash,
        names: bytes,
        tokens: bytes,
        max_tokens: int,
        then: Callable[[PoolHit], None],
        *,
        token_seconds: float | None = None,
        elsewhere: RemotePrefix | None = None,
    ) -> None:
        """The longest prefix of a chain that the pool has, at most `max_tokens` long. `then` is
        called once, within a set time: too slow an answer, or no pool, is a miss. If the pool is
        loading more of it, that is waited for while computing it would take longer, `token_seconds`
        a token."""
        ...

    def release_pin(self, pin: PoolPin) -> None:
        """Nothing reads any more what was found under `pin`. Once for each pin."""
        ...

    def publish_blocks(self, job: PublishRequest) -> bool:
        """Copy blocks into the pool, some time. False: not taken, and `job.then` will not be
        called."""
        ...

    def counters(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class PoolClientContext:
    """What a client is made of. In `address_space` the pool's segment is to be mapped, beside
    `own_arena`, the node's arena, which is mapped there already and whose blocks publications are
    copied from."""

    config: Config
    name: str
    host_id: str
    model_digest: bytes
    layout: KVLayout
    address_space: BlockAddressSpace
    own_arena: memoryview


PoolClientFactory = Callable[[PoolClientContext], SharedPoolClient]
