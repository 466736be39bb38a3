"""A node's use of its host's shared pool, as its compute thread sees it.

    a command arrives with a pool hit    -> build_pool_prefix: what the scheduler can start with
    a prompt was computed, a block fills -> publish_sequence: the pool client copies, on a thread
    PublicationEnded                     -> on_publication_ended: the pool's blocks replace own
                                            copies in block tables, between two steps

Nothing here waits for the pool; without a pool nothing happens.
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
    """A publication of blocks of `sequence` to the shared pool has ended."""

    sequence: Sequence
    owner_label: str  # under which the publication holds references on `source_blocks`
    source_blocks: tuple[BlockIndex, ...]
    pool_pins: tuple[RefCountedPin, ...]  # keep the prefix before the sources in the pool
    is_rate_limited: bool
    pool_hit: PoolHit | None  # what the pool has now, pinned; None if the publication failed


class PoolConnector:
    """Reads prefixes from the shared pool and publishes blocks to it.

    Compute thread only, except `publication_epoch` and `counters`.
    """

    def __init__(
        self,
        pool_client: SharedPoolClient | None,
        pool: BlockPool,
        scheduler: Scheduler,
        emit: Callable[[object], None],
        *,
        in_place: bool = True,
        copy_seconds: float = 0.0,
    ) -> None:
        """`emit` puts a PublicationEnded on the compute thread's inbox.

        `in_place`: the engine reads the pool's blocks where they are; otherwise they are copied,
        which takes `copy_seconds` per block, and block tables keep own blocks.
        """
        self._pool_client = pool_client
        self._block_pool = pool
        self._scheduler = scheduler
        self._emit = emit
        self._can_read_in_place = in_place
        self.copy_cost_model = CopyCostModel(copy_seconds)
        self._publication_numbers = count(1)
        self._num_deduped_blocks = 0
        self.publication_epoch = 0  # publications put on the inbox; written by the event loop

    def counters(self) -> dict[str, float]:
        return (
            {"baton_pool_repointed_blocks_total": float(self._num_deduped_blocks)}
            if self._pool_client
            else {}
        )

    def build_pool_prefix(self, hit: PoolHit | None) -> PoolPrefix | None:
        """The pool prefix that a command came with; the caller owns its reference on the pin."""
        if hit is None or hit.pin is None:
            return None
        partial = (
            PartialHit(*hit.partial_block)
            if hit.partial_block and self.copy_cost_model.is_copy_worthwhile(hit.partial_block[1])
            else None
        )
        return PoolPrefix(hit.blocks, partial, self._build_pin(hit.pin), hit.remote_blocks)

    def publish_sequence(self, sequence: Sequence, *, is_rate_limited: bool = False) -> None:
        """Publish the full blocks that this node has computed or received for `sequence`.

        The sequence may have ended. It has one publication at a time; blocks that fill meanwhile
        are published afterwards.
        """
        if self._pool_client is None or not self._pool_client.is_attached or sequence.is_publishing:
            return
        end = sequence.num_published_blocks = sequence.num_indexed_blocks
        sources = self._block_pool.find_own_suffix(sequence.chain, end)
        if not sources:
            return
        label = f"publication {next(self._publication_numbers)}"
        packed_hashes, packed_tokens = sequence.chain.packed_prefix(end)

        def on_done(hit: PoolHit | None) -> None:
            self.publication_epoch += 1
            self._emit(PublicationEnded(sequence, label, sources, pins, is_rate_limited, hit))

        pins = tuple(pin.acquire() for pin in sequence.pool_pins)
        self._block_pool.share_blocks(sources, label)
        sequence.is_publishing = True
        first = end - len(sources)
        request = PublishRequest(
            sequence.chain.root_hash,
            packed_hashes,
            packed_tokens,
            first,
            sources,
            on_done,
            is_rate_limited,
        )
        if not self._pool_client.publish_blocks(request):
            self._end_publication(
                PublicationEnded(sequence, label, sources, pins, is_rate_limited, None)
            )

    def publish_filled_blocks(self, sequence: Sequence) -> None:
        """While decoding: publish the blocks that have filled since the last publication.

        The blocks of the context are left to the node that computed it, until the sequence ends.
        """
        published = sequence.num_published_blocks
        if sequence.state is not SequenceState.FINISHED:
            published = max(published, sequence.context_len // self._block_pool.block_size)
        if sequence.num_indexed_blocks > published:
            self.publish_sequence(sequence, is_rate_limited=True)

    def on_publication_ended(self, done: PublicationEnded) -> None:
        """Replace own copies by the published blocks, if possible. Called between two steps."""
        hit = done.pool_hit
        if hit is not None and hit.pin is not None:
            pin = self._build_pin(hit.pin)
            if self._can_read_in_place:
                self._num_deduped_blocks += self._scheduler.dedup_to_shared_pool(
                    done.sequence.chain, hit.blocks, pin
                )
            pin.release()
        self._end_publication(done)
        if hit is not None and done.is_rate_limited:
            self.publish_filled_blocks(done.sequence)

    def _end_publication(self, done: PublicationEnded) -> None:
        done.sequence.is_publishing = False
        self._block_pool.release_blocks(done.source_blocks, done.owner_label)
        for pin in done.pool_pins:
            pin.release()

    def _build_pin(self, pin: PoolPin) -> RefCountedPin:
        pool_client = self._pool_client
        assert pool_client is not None, "a pin without a pool"
        return RefCountedPin(lambda: pool_client.release_pin(pin))
