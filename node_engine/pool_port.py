"""What a node needs of the client of its host's shared pool. Launchers bring one; node_engine does not know which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.addressing import AddressSpace
from baton.block_hash import BlockHash
from baton.config import Config
from baton.kv_layout import KVLayout
from baton.pool_terms import Elsewhere, PoolHit, PoolPin, Publish


class PoolPort(Protocol):
    """All but `run` may be called from any thread, return at once and raise nothing for what the pool does. Callbacks
    run on the event loop, in the order in which the pool answered."""

    @property
    def attached(self) -> bool: ...

    async def run(self) -> None:
        """Be attached to the pool, again and again, until cancelled."""
        ...

    def find(
        self,
        root: BlockHash,
        names: bytes,
        tokens: bytes,
        max_tokens: int,
        then: Callable[[PoolHit], None],
        *,
        token_seconds: float | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """The longest prefix of a chain that the pool has, at most `max_tokens` long. `then` is called once, within a
        set time: too slow an answer, or no pool, is a miss. If the pool is loading more of it, that is waited for while
        computing it would take longer, `token_seconds` a token."""
        ...

    def release(self, pin: PoolPin) -> None:
        """Nothing reads any more what was found under `pin`. Once for each pin."""
        ...

    def publish(self, job: Publish) -> bool:
        """Copy blocks into the pool, some time. False: not taken, and `job.then` will not be called."""
        ...

    def counters(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class PoolParts:
    """What a client is made of. In `space` the pool's segment is to be mapped, beside `own`, the node's arena, which
    is mapped there already and whose blocks publications are copied from."""

    config: Config
    name: str
    host_id: str
    model_digest: bytes
    layout: KVLayout
    space: AddressSpace
    own: memoryview


MakePool = Callable[[PoolParts], PoolPort]
