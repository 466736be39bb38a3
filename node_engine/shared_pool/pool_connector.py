"""A node's use of its host's shared pool, as its compute thread sees it.

    a command arrives with a pool hit    -> build_pool_prefix: what the scheduler can start with
    a prompt was computed, a block fills -> publish_sequence: the pool client copies, on a thread
    PublicationEnded                     -> on_publication_ended: the pool's blocks replace own
                                            copies in block tables, between two steps

Nothing here waits for the pool; without a pool nothing happens.

Looks up prefixes in the shared pool before commands reach the compute thread.

Look-ups run on the event loop: no step waits for them. Commands of an attempt whose look-up is
pending wait behind it. A
cancel of the attempt ends its look-up; a command that concerns all attempts ends all look-ups; the
loss of a peer ends those of commands that name it as KV writer. Queries for the ledger or the cache
neither wait nor end a look-up: an operator's query must not cost prompts their pool hits.

A look-up during which a publication of this node has ended is repeated: the compute thread gives up
own copies of published blocks, so the older answer may lack blocks that are no longer here.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count

from baton.cluster_link.messages import (
    CacheSnapshotRequest,
    CancelOrder,
    DecodeOrder,
    LedgerQuery,
    PeerLostNotice,
    PrefillOrder,
)
from baton.errors import NodeFailed
from baton.kv.blocks import BlockHash, compute_packed_hashes, pack_tokens, root_hash
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.types import AttemptKey, BlockIndex, Incarnation
from node_engine.core.blocks.block_pool import BlockPool, PartialHit
from node_engine.core.blocks.copy_cost_model import CopyCostModel
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.node_commands import NodeCommand, OrderWithPoolHit, get_attempt_key
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.core.step.engine import Engine
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


_log = log.get_logger("pool")


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
        save_blocks: Callable[[tuple[BlockIndex, ...]], Future[None]],
        in_place: bool = True,
        copy_seconds: float = 0.0,
    ) -> None:
        """`emit` puts a PublicationEnded on the compute thread's inbox. `save_blocks` makes the
        arena have what was computed for some blocks (`Engine.save_blocks`).

        `in_place`: the engine reads the pool's blocks where they are; otherwise they are copied,
        which takes `copy_seconds` per block, and block tables keep own blocks.
        """
        self._pool_client = pool_client
        self._block_pool = pool
        self._scheduler = scheduler
        self._emit = emit
        self._save_blocks = save_blocks
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

    def build_pool_prefix(self, hit: PoolHit) -> PoolPrefix | None:
        """The pool prefix that a command came with; the caller owns its reference on the pin."""
        if hit.pin is None:
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

        pins = tuple(pin.acquire() for pin in sequence.pool_use.pins)
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
        refused = PublicationEnded(sequence, label, sources, pins, is_rate_limited, None)
        try:
            saved = self._save_blocks(sources)
        except NodeFailed as error:  # no memory for the copy: the blocks are not published
            _log.warning("blocks not published", reason=str(error))
            self._emit(refused)
            return
        saved.add_done_callback(lambda done: self._publish_saved_blocks(done, request, refused))

    def _publish_saved_blocks(
        self, saved: Future[None], request: PublishRequest, refused: PublicationEnded
    ) -> None:
        """The pool may read the blocks. Called on any thread."""
        assert self._pool_client is not None
        if (error := saved.exception()) is not None:
            _log.error("blocks not published", reason=str(error).partition("\n")[0])
            self._emit(refused)
        elif not self._pool_client.publish_blocks(request):
            self._emit(refused)

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


_MAX_TRIES = 3


@dataclass(slots=True, eq=False)
class _PendingLookup:
    """A command that waits for the pool, and the later commands of the same attempt."""

    command: DecodeOrder | PrefillOrder
    since: float  # clock time, in seconds
    queued_commands: list[NodeCommand] = field(default_factory=list)
    num_tries: int = 0
    num_remote_blocks: int = 0  # fetched from another host's pool for the tries so far


class PoolLookups:
    """Delivers commands to the compute thread, with the pool hit of their context if it has one."""

    def __init__(
        self,
        pool_client: SharedPoolClient,
        engine: Engine,
        pool_connector: PoolConnector,
        deliver: Callable[[NodeCommand], None],
        clock: Clock = monotonic_clock,
    ) -> None:
        """`deliver` puts a command on the compute thread's inbox."""
        self._pool_client = pool_client
        self._engine = engine
        self._pool_connector = pool_connector
        self._deliver_command = deliver
        self._pending: dict[AttemptKey, _PendingLookup] = {}
        self._clock = clock
        self._hits = self._misses = 0
        self._seconds = 0.0  # total duration of all look-ups

    def counters(self) -> dict[str, float]:
        results = (("hit", self._hits), ("miss", self._misses))
        found = {
            f'baton_pool_lookups_total{{result="{name}"}}': float(number)
            for name, number in results
        }
        return found | {"baton_pool_lookup_seconds_total": self._seconds}

    def submit_command(self, command: NodeCommand) -> None:
        """Accept the next command of the stream; deliver it now or after a look-up."""
        key = get_attempt_key(command)
        if key is None:
            self._end_affected_lookups(command)
        elif (lookup := self._pending.get(key)) is not None:
            lookup.queued_commands.append(command)
            if isinstance(command, CancelOrder):
                self._end_lookup(lookup, None)
            return
        elif isinstance(command, DecodeOrder | PrefillOrder) and self._pool_client.is_attached:
            self._begin_lookup(command)
            return
        self._deliver_command(command)

    def end_all_lookups(self) -> None:
        """Deliver all waiting commands now, without a pool hit."""
        for lookup in tuple(self._pending.values()):
            self._end_lookup(lookup, None)

    def _end_affected_lookups(self, command: NodeCommand) -> None:
        """End the look-ups that must not delay a command that is not about one attempt."""
        match command:
            case LedgerQuery() | CacheSnapshotRequest():
                pass
            case PeerLostNotice(incarnation):
                for lookup in tuple(self._pending.values()):
                    if isinstance(lookup.command, DecodeOrder) and _is_writer(
                        incarnation, lookup.command
                    ):
                        self._end_lookup(lookup, None)
            case _:
                self.end_all_lookups()

    def _begin_lookup(self, command: DecodeOrder | PrefillOrder) -> None:
        work = command.work
        reusable = (
            0
            if work.request.sampling.prompt_logprobs is not None
            else len(work.context_token_ids) - 1
        )
        try:
            tokens = pack_tokens(work.context_token_ids)
        except (OverflowError, TypeError):  # invalid token ids: the role reports them
            reusable = 0
        if reusable <= 0:
            self._deliver_command(command)
            return
        layout = self._engine.layout
        root = root_hash(self._engine.model_digest, layout, work.request.cache_salt)
        lookup = self._pending[work.key] = _PendingLookup(command, self._clock())
        packed_hashes = compute_packed_hashes(root, tokens, layout.block_size)
        self._query_pool(lookup, root, packed_hashes, tokens, reusable)

    def _query_pool(
        self,
        lookup: _PendingLookup,
        root: BlockHash,
        packed_hashes: bytes,
        packed_tokens: bytes,
        max_tokens: int,
    ) -> None:
        epoch = self._pool_connector.publication_epoch
        lookup.num_tries += 1

        def on_done(hit: PoolHit) -> None:
            lookup.num_remote_blocks += hit.remote_blocks
            if self._pending.get(lookup.command.work.key) is not lookup:
                self._release_hit(hit)
            elif epoch != self._pool_connector.publication_epoch and lookup.num_tries < _MAX_TRIES:
                self._release_hit(hit)
                self._query_pool(lookup, root, packed_hashes, packed_tokens, max_tokens)
            else:
                num_remote_blocks = min(lookup.num_remote_blocks, len(hit.blocks))
                self._end_lookup(lookup, replace(hit, remote_blocks=num_remote_blocks))

        remote_prefix = lookup.command.remote_prefix
        self._pool_client.find_prefix(
            root,
            packed_hashes,
            packed_tokens,
            max_tokens,
            on_done,
            token_seconds=self._pool_connector.copy_cost_model.seconds_per_token,
            remote_prefix=remote_prefix,
        )

    def _release_hit(self, hit: PoolHit) -> None:
        if hit.pin is not None:
            self._pool_client.release_pin(hit.pin)

    def _end_lookup(self, lookup: _PendingLookup, hit: PoolHit | None) -> None:
        del self._pending[lookup.command.work.key]
        found = hit if hit is not None and hit.pin is not None else None
        self._hits += found is not None
        self._misses += found is None
        self._seconds += self._clock() - lookup.since
        order = lookup.command
        self._deliver_command(order if found is None else OrderWithPoolHit(order, found))
        for command in lookup.queued_commands:
            self._deliver_command(command)


def _is_writer(incarnation: Incarnation, command: DecodeOrder) -> bool:
    return command.kv_writer is not None and command.kv_writer.incarnation == incarnation
