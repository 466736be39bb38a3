"""A node's use of its host's shared pool, as its compute thread sees it.

    a look-up's answer comes with the order -> `pooled`: what the scheduler may start a sequence with
    a prompt is computed, a block fills     -> `publish`: the pool's client copies, some time, on a thread of its own
    Published                               -> `published`: own copies make way for the pool's blocks, between two steps

Nothing here waits for the pool, and without one nothing happens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest
from baton.types import BlockIndex
from node_engine.core.blocks.block_pool import BlockPool, PartialHit
from node_engine.core.blocks.copy_cost_model import CopyCostModel
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.shared_pool.pool_client import SharedPoolClient


@dataclass(frozen=True, slots=True)
class PublicationEnded:
    """A publication of `sequence` has ended: `pool_hit`, pinned, is what the pool has of its
    tokens, None if it failed."""

    sequence: Sequence
    owner_label: str
    source_blocks: tuple[BlockIndex, ...]
    pool_pins: tuple[RefCountedPin, ...]  # what precedes the sources stays in the pool
    is_rate_limited: bool
    pool_hit: PoolHit | None


class PoolConnector:
    """`emit` puts a Published on the compute thread's inbox. `in_place`: the engine reads the
    pool's blocks where they are; otherwise they are copied, and nothing is re-pointed. Called on
    the compute thread only, but for `publication_epoch` and `counters`."""

    def __init__(
        self,
        port: SharedPoolClient | None,
        pool: BlockPool,
        scheduler: Scheduler,
        emit: Callable[[object], None],
        *,
        in_place: bool = True,
        copy_seconds: float = 0.0,
    ) -> None:
        self._pool_client = port
        self._block_pool = pool
        self._scheduler = scheduler
        self._emit = emit
        self._can_read_in_place = in_place
        self.copy_cost_model = CopyCostModel(copy_seconds)
        self._publication_numbers = count(1)
        self._num_deduped_blocks = 0
        self.publication_epoch = (
            0  # of the event loop's: how many publications have been put on the inbox
        )

    def counters(self) -> dict[str, float]:
        return (
            {"baton_pool_repointed_blocks_total": float(self._num_deduped_blocks)}
            if self._pool_client
            else {}
        )

    def build_pool_prefix(self, hit: PoolHit | None) -> PoolPrefix | None:
        """What an order may start with. Whoever gets it owns its pin."""
        if hit is None or hit.pin is None:
            return None
        partial = (
            PartialHit(*hit.partial_block)
            if hit.partial_block and self.copy_cost_model.is_copy_worthwhile(hit.partial_block[1])
            else None
        )
        return PoolPrefix(hit.blocks, partial, self._build_pin(hit.pin), hit.remote_blocks)

    def publish_sequence(self, sequence: Sequence, *, paced: bool = False) -> None:
        """Give the pool the full blocks that this node has computed or received for `sequence`,
        which may have ended. One publication of a sequence is under way at a time; what fills
        meanwhile follows it."""
        if self._pool_client is None or not self._pool_client.is_attached or sequence.is_publishing:
            return
        end = sequence.num_published_blocks = sequence.num_indexed_blocks
        sources = self._block_pool.find_own_suffix(sequence.chain, end)
        if not sources:
            return
        label = f"publication {next(self._publication_numbers)}"
        names, tokens = sequence.chain.packed_prefix(end)

        def then(hit: PoolHit | None) -> None:
            self.publication_epoch += 1
            self._emit(PublicationEnded(sequence, label, sources, holds, paced, hit))

        holds = tuple(hold.acquire() for hold in sequence.pool_pins)
        self._block_pool.share_blocks(sources, label)
        sequence.is_publishing = True
        first = end - len(sources)
        if not self._pool_client.publish_blocks(
            PublishRequest(sequence.chain.root_hash, names, tokens, first, sources, then, paced)
        ):
            self._end_publication(PublicationEnded(sequence, label, sources, holds, paced, None))

    def publish_filled_blocks(self, sequence: Sequence) -> None:
        """Decode: publish if a block has filled here since the last time, or the sequence has
        ended."""
        known = sequence.num_published_blocks
        if (
            sequence.state is not SequenceState.FINISHED
        ):  # the context is published by whoever computed it
            known = max(known, sequence.context_len // self._block_pool.block_size)
        if sequence.num_indexed_blocks > known:
            self.publish_sequence(sequence, paced=True)

    def on_publication_ended(self, done: PublicationEnded) -> None:
        """Between two steps."""
        hit = done.pool_hit
        if hit is not None and hit.pin is not None:
            hold = self._build_pin(hit.pin)
            if self._can_read_in_place:
                self._num_deduped_blocks += self._scheduler.dedup_to_shared_pool(
                    done.sequence.chain, hit.blocks, hold
                )
            hold.release()
        self._end_publication(done)
        if hit is not None and done.is_rate_limited:
            self.publish_filled_blocks(done.sequence)

    def _end_publication(self, done: PublicationEnded) -> None:
        done.sequence.is_publishing = False
        self._block_pool.release_blocks(done.source_blocks, done.owner_label)
        for hold in done.pool_pins:
            hold.release()

    def _build_pin(self, pin: PoolPin) -> RefCountedPin:
        port = self._pool_client
        assert port is not None, "a pin without a pool"
        return RefCountedPin(lambda: port.release_pin(pin))
