"""The shared block pool: which blocks hold what, who may read or write them, when they are reused.

    FREE --reserve--> WRITING --seal--> CACHED <--find, last release--> IN_USE
                         |                 +--evict--> FREE
                         +--withdrawn, checksum wrong, or publisher known to be dead--> FREE

Blocks that a suspect attachment pins or was writing are QUARANTINED until the attachment has
ended: they are not evicted, and other clients can still read those that were findable. This module
touches no memory; the process that maps the segment calls it and carries out what it returns.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from kv_pool.core.blocks.attachments import (
    AttachmentRecord,
    AttachmentState,
    AttachmentTable,
    PinId,
    PoolClientId,
    PoolMatch,
    Publication,
    PublicationGrant,
    PublicationId,
)
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.demotion import Demotion, plan_demotions
from kv_pool.core.index.radix_index import ROOT, PromptChain
from kv_pool.core.ledger import (
    PoolBlockState,
    PoolLedger,
    PoolLedgerEntry,
    require_invariant,
)


class SharedBlockPool:
    """The blocks of memory (the segment) and disk, with the attachments that use them.

    `now` is in seconds of a monotonic clock everywhere. Methods raise PoolLedgerError for a client
    that is not attached, and KeyError for a pin or publication that the client does not have.
    """

    def __init__(self, memory: CacheTier, disk: CacheTier | None = None) -> None:
        self.memory = memory
        self.disk = disk
        # Blocks evicted without a demotion, for lack of room on disk or of staging rows.
        self.dropped_demotions = 0
        self._demotion_limit: Callable[[], int] = lambda: memory.num_blocks
        self._demotions: list[Demotion] = []
        self._disk_is_full = False  # during the present allocation
        self._now = 0.0
        memory.add_listeners(on_remove=self._demote_block)
        self.attachments = AttachmentTable()
        self._ids = count(1)

    def remove_client(self, client_id: PoolClientId) -> None:
        """Free everything of a client that is known to have unmapped the segment."""
        attachment = self.attachments.remove_client(client_id)
        for publication in attachment.publications.values():
            self._free_publication(publication)
        for pinned in attachment.pins.values():
            self._unpin(pinned)

    # readers

    def find_prefix(
        self,
        client_id: PoolClientId,
        chain: PromptChain,
        max_tokens: int,
        now: float,
        *,
        partial: bool = True,
    ) -> PoolMatch:
        """Find and pin the longest prefix of `chain` in memory, of at most `max_tokens` tokens.

        With `partial`, a block that continues the prefix by at least one token is pinned too.
        """
        path = self.memory.match_prefix(chain, now, max_tokens // chain.block_size)
        match = self.memory.index.match_partial_block(chain, path) if partial else None
        tokens_left = max_tokens - len(path) * chain.block_size
        match = (match[0], min(match[1], tokens_left)) if match and tokens_left > 0 else None
        pinned = (*path[-1:], *([match[0]] if match else ()))
        return PoolMatch(self._pin(client_id, pinned), path, match)

    def release_pin(self, client_id: PoolClientId, pin: PinId) -> None:
        self._unpin(self.attachments.get_live(client_id).pins.pop(pin))

    # publishers

    def reserve_blocks(
        self,
        client_id: PoolClientId,
        chain: PromptChain,
        first: int,
        now: float,
        end: int | None = None,
    ) -> PublicationGrant:
        """Reserve blocks for those of the chain's full blocks `first` to `end` not in memory.

        Grants nothing if a block before `first` is not in memory, and only the first ones if there
        is no room for all. The caller must carry out `take_demotions` before the client writes to
        the granted blocks.
        """
        attachment = self.attachments.get_live(client_id)
        end = len(chain) if end is None else min(end, len(chain))
        path = self.memory.index.match_prefix(chain, end)
        start = len(path)
        if start < first or start >= end:
            return PublicationGrant(None, start, ())
        self._now = now
        parent = path[-1] if path else ROOT
        if parent != ROOT:
            self.memory.pin(parent)  # allocation must not evict the parent of the new blocks
        blocks = tuple(self.memory.allocate_blocks(end - start, now))
        if not blocks:
            self._unpin((parent,) if parent != ROOT else ())
            return PublicationGrant(None, start, ())
        publication = PublicationId(next(self._ids))
        attachment.publications[publication] = Publication(chain, start, blocks, parent)
        return PublicationGrant(publication, start, blocks)

    def get_publication(self, client_id: PoolClientId, publication: PublicationId) -> Publication:
        """Return an unfinished publication."""
        return self.attachments.get_live(client_id).publications[publication]

    def seal_publication(
        self, client_id: PoolClientId, publication: PublicationId, num_verified: int, now: float
    ) -> PoolMatch:
        """Make the first `num_verified` blocks of a publication findable, and free the others.

        A block that another client has published meanwhile is freed too. Returns the chain's blocks
        up to the last verified one, pinned, for the publisher to use instead of its own.
        """
        sealed = self.attachments.get_live(client_id).publications.pop(publication)
        self._insert_publication(sealed, num_verified, now)
        path = self.memory.index.match_prefix(sealed.chain, sealed.first_block + num_verified)
        pin = self._pin(client_id, path[-1:])
        self._unpin((sealed.parent_block,) if sealed.parent_block != ROOT else ())
        return PoolMatch(pin, path)

    def withdraw_publication(self, client_id: PoolClientId, publication: PublicationId) -> None:
        """Free the blocks of a publication; its publisher has stopped writing to them."""
        self._free_publication(self.attachments.get_live(client_id).publications.pop(publication))

    # disk

    def mount_disk(self, disk: CacheTier | None, demotion_limit: Callable[[], int]) -> None:
        """Use `disk` from now on, or no disk if it is None.

        `demotion_limit` returns how many blocks may be demoted until the next `take_demotions`.
        """
        self.disk, self._demotion_limit = disk, demotion_limit
        self._demotions = []

    def take_demotions(self) -> tuple[Demotion, ...]:
        """Return the blocks to copy to disk, in this order, before their memory is reused.

        They are in the disk's index already; if one cannot be copied, remove it there with all that
        follow it. Blocks that the disk has evicted again since are left out, because their slot
        belongs to another block.
        """
        planned, self._demotions, self._disk_is_full = self._demotions, [], False
        latest = {demotion.disk_slot: demotion for demotion in planned}
        on_disk = self.disk.index if self.disk is not None else ()
        return tuple(
            demotion
            for demotion in planned
            if demotion.disk_slot in on_disk and latest[demotion.disk_slot] is demotion
        )

    def find_on_disk(self, chain: PromptChain, first: int, end: int, now: float) -> "array[int]":
        """Return the disk slots of the chain's blocks from `first` (not in memory) up to `end`.

        To load them: `reserve_blocks` up to their end, copy, verify, `seal_publication`.
        """
        if self.disk is None:
            return array("i")
        return self.disk.match_prefix(chain, now, end)[first:]

    # ledger

    def ledger(self, now: float) -> PoolLedger:
        """Return the ledger of memory. O(pinned blocks)."""
        live_attachments = self.attachments.list_in_state(AttachmentState.LIVE)
        suspect_attachments = self.attachments.list_in_state(AttachmentState.SUSPECT)
        live = self._pinned_paths(live_attachments)
        suspect = self._pinned_paths(suspect_attachments) - live
        writing, suspect_writing = (
            sum(attachment.num_writing_blocks() for attachment in attachments)
            for attachments in (live_attachments, suspect_attachments)
        )
        counts = {
            PoolBlockState.FREE: len(self.memory.free_list),
            PoolBlockState.WRITING: writing,
            PoolBlockState.IN_USE: len(live),
            PoolBlockState.QUARANTINED: len(suspect) + suspect_writing,
            PoolBlockState.CACHED: len(self.memory.index) - len(live) - len(suspect),
        }
        return PoolLedger(self.memory.num_blocks, counts, tuple(self._ledger_entries(now)))

    def check(self) -> None:
        """Raise PoolLedgerError unless all tables are consistent. Slow, for tests: O(blocks)."""
        self.memory.check()
        pins: dict[int, int] = {}
        for _, attachment in self.attachments:
            for block in attachment.pinned_blocks():
                pins[block] = pins.get(block, 0) + 1
        pin_counts = {block: count for block, count in enumerate(self.memory.pin_counts) if count}
        require_invariant(pins == pin_counts, "pins are not what the attachments hold")
        require_invariant(self.ledger(0.0).is_balanced, "the states do not add up to all blocks")

    # internal

    def _pin(self, client_id: PoolClientId, blocks: "Sequence[int]") -> PinId | None:
        attachment = self.attachments.get_live(client_id)
        if not blocks:
            return None
        for block in blocks:
            self.memory.pin(block)
        pin = PinId(next(self._ids))
        attachment.pins[pin] = tuple(blocks)
        return pin

    def _unpin(self, blocks: "Sequence[int]") -> None:
        for block in blocks:
            self.memory.unpin(block)

    def _insert_publication(self, sealed: Publication, num_verified: int, now: float) -> None:
        """Index the verified blocks in order, and free those that are not verified or not needed.

        Blocks of the chain that another client has inserted meanwhile are used instead.
        """
        end = sealed.first_block + num_verified
        path = self.memory.index.match_prefix(sealed.chain, end)
        parent, number = path[-1] if path else ROOT, len(path)
        while number < end:
            block = sealed.blocks[number - sealed.first_block]
            if not self.memory.insert_block(block, sealed.chain, number, parent, now):
                break
            parent, number = block, number + 1
        inserted = range(len(path), number)
        for number, block in enumerate(sealed.blocks, sealed.first_block):
            if number not in inserted:
                self.memory.free_block(block)

    def _demote_block(self, block: int) -> None:
        """Plan the demotion of a block that memory is about to evict, if it was ever used."""
        disk, block_hash = self.disk, self.memory.index.block_hash(block)
        if disk is None or not self.memory.used_flags[block]:
            return
        if not self._disk_is_full and disk.index.find_block(block_hash) is None:
            limit = self._demotion_limit() - len(self._demotions)
            planned = (
                plan_demotions(self.memory, disk, block, self._now, limit) if limit > 0 else []
            )
            self._demotions += planned
            # Do not look for room again: each attempt costs O(length of the prompt).
            self._disk_is_full = not planned
        self.dropped_demotions += disk.index.find_block(block_hash) is None

    def _free_publication(self, publication: Publication) -> None:
        for block in publication.blocks:
            self.memory.free_block(block)
        self._unpin((publication.parent_block,) if publication.parent_block != ROOT else ())

    def _pinned_paths(self, attachments: Iterable[AttachmentRecord]) -> set[int]:
        """Return the blocks that `attachments` keep from eviction: what they pin and all before."""
        found: set[int] = set()
        for attachment in attachments:
            for block in attachment.pinned_blocks():
                while block != ROOT and block not in found:
                    found.add(block)
                    block = self.memory.index.paths.parent(block)
        return found

    def _ledger_entries(self, now: float) -> Iterator[PoolLedgerEntry]:
        for client_id, attachment in self.attachments:
            is_live = attachment.state is AttachmentState.LIVE
            pinned = len(self._pinned_paths([attachment]))
            for state, num_blocks in (
                (PoolBlockState.IN_USE if is_live else PoolBlockState.QUARANTINED, pinned),
                (
                    PoolBlockState.WRITING if is_live else PoolBlockState.QUARANTINED,
                    attachment.num_writing_blocks(),
                ),
            ):
                if num_blocks:
                    age = now - attachment.state_since
                    yield PoolLedgerEntry(client_id, state, num_blocks, age)
