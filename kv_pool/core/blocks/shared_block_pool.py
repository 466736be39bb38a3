"""The pool: what is where, who may read and write it, and when its memory may be used for something
else.

    FREE --reserve--> WRITING --seal--> CACHED <--find, last release--> IN_USE
                         |                 +--evict--> FREE
                         +--withdraw, a copy that is not whole, or its publisher proven gone--> FREE

What a doubtful attachment pins or was writing is QUARANTINED: readable by others if it was
readable, but not evicted, until the attachment is proven gone. No byte is touched here; the process
that maps the segment asks and obeys.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from kv_pool.core.blocks.attachments import (
    AttachmentRecord,
    AttachmentState,
    PinId,
    PoolClientId,
    PoolMatch,
    Publication,
    PublicationGrant,
    PublicationId,
)
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.demotion import Demotion, plan_demotions
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.core.index.radix_index import ROOT
from kv_pool.core.ledger import (
    PoolBlockState,
    PoolLedger,
    PoolLedgerEntry,
    PoolLedgerError,
    require_invariant,
)


class SharedBlockPool:
    """`memory`: the segment's blocks; `disk`: the file's. `now` is in seconds of a steady clock. A
    holder that is not attached and a pin or publication that it does not have are errors of the
    caller's (LedgerError, KeyError)."""

    def __init__(self, memory: CacheTier, disk: CacheTier | None = None) -> None:
        self.memory = memory
        self.disk = disk
        # blocks that were to go to disk, when there was no room, or nothing more could be moved
        self.dropped_demotions = 0
        self._demotion_limit: Callable[[], int] = lambda: memory.num_blocks
        self._demotions: list[Demotion] = []
        self._disk_is_full = False  # for what is to be moved now
        self._now = 0.0
        memory.add_listeners(losing=self._demote_block)
        self._attachments: dict[PoolClientId, AttachmentRecord] = {}
        self._ids = count(1)

    @property
    def suspect_clients(self) -> tuple[PoolClientId, ...]:
        """Attachments of which proof of their end is wanted."""
        return tuple(
            name for name, one in self._attachments.items() if one.state is AttachmentState.SUSPECT
        )

    def is_live(self, holder: PoolClientId) -> bool:
        attachment = self._attachments.get(holder)
        return attachment is not None and attachment.state is AttachmentState.LIVE

    @property
    def num_pins(self) -> int:
        """That anybody holds."""
        return sum(len(one.pins) for one in self._attachments.values())

    def num_unfinished_publications(self, holder: PoolClientId) -> int:
        """Publications that are neither sealed nor withdrawn."""
        return len(self._get_live(holder).publications)

    # attachments

    def attach_client(self, holder: PoolClientId, now: float) -> None:
        require_invariant(holder not in self._attachments, f"{holder} is attached already")
        self._attachments[holder] = AttachmentRecord(now)

    def mark_suspect(self, holder: PoolClientId, now: float) -> None:
        """Its stream is broken. It asks for nothing any more; what it has stays."""
        self._attachments[holder].state = AttachmentState.SUSPECT
        self._attachments[holder].state_since = now

    def remove_client(self, holder: PoolClientId) -> None:
        """It said goodbye after it had let go of the segment, or that was proven: everything it had
        is free."""
        ending = self._attachments.pop(holder)
        for publication in ending.publications.values():
            self._free_publication(publication)
        for pinned in ending.pins.values():
            self._unpin(pinned)

    # readers

    def find_prefix(
        self,
        holder: PoolClientId,
        chain: PromptChain,
        most_tokens: int,
        now: float,
        *,
        partial: bool = True,
    ) -> PoolMatch:
        """The longest prefix of `chain`, at most `most_tokens`, that may be read now; it is pinned.
        With `partial`, the block that goes on from there with at least one token more is pinned
        too."""
        path = self.memory.match_prefix(chain, now, most_tokens // chain.block_size)
        more = self.memory.index.match_partial_block(chain, path) if partial else None
        room = most_tokens - len(path) * chain.block_size
        more = (more[0], min(more[1], room)) if more and room > 0 else None
        pinned = (*path[-1:], *([more[0]] if more else ()))
        return PoolMatch(self._pin(holder, pinned), path, more)

    def release_pin(self, holder: PoolClientId, pin: PinId) -> None:
        self._unpin(self._get_live(holder).pins.pop(pin))

    # publishers

    def reserve_blocks(
        self,
        holder: PoolClientId,
        chain: PromptChain,
        first: int,
        now: float,
        end: int | None = None,
    ) -> PublicationGrant:
        """Places for those full blocks of `chain` that are not here: of `first` to `end`, which the
        publisher has. None if what precedes `first` is not here; the first ones, if there is no
        room for all. What `take_demotions` then returns is to be carried out before anything is
        written to them."""
        attachment = self._get_live(holder)
        end = len(chain) if end is None else min(end, len(chain))
        path = self.memory.index.match_prefix(chain, end)
        start = len(path)
        if start < first or start >= end:
            return PublicationGrant(None, start, ())
        self._now = now
        parent = path[-1] if path else ROOT
        if parent != ROOT:
            self.memory.pin(parent)  # before room is made for its children
        blocks = tuple(self.memory.allocate_blocks(end - start, now))
        if not blocks:
            self._unpin((parent,) if parent != ROOT else ())
            return PublicationGrant(None, start, ())
        publication = PublicationId(next(self._ids))
        attachment.publications[publication] = Publication(chain, start, blocks, parent)
        return PublicationGrant(publication, start, blocks)

    def get_publication(self, holder: PoolClientId, publication: PublicationId) -> Publication:
        """What is being written: whose copy is to be verified before it is sealed."""
        return self._get_live(holder).publications[publication]

    def seal_publication(
        self, holder: PoolClientId, publication: PublicationId, whole: int, now: float
    ) -> PoolMatch:
        """The first `whole` blocks of a publication are verified: they are findable from now on,
        unless somebody else published the same meanwhile. The rest is free again. Returns the
        chain's blocks up to there, pinned, for the publisher to use instead of its own."""
        done = self._get_live(holder).publications.pop(publication)
        self._insert_publication(done, whole, now)
        path = self.memory.index.match_prefix(done.chain, done.first_block + whole)
        pin = self._pin(holder, path[-1:])
        self._unpin((done.parent_block,) if done.parent_block != ROOT else ())
        return PoolMatch(pin, path)

    def withdraw_publication(self, holder: PoolClientId, publication: PublicationId) -> None:
        """Its publisher writes there no more."""
        self._free_publication(self._get_live(holder).publications.pop(publication))

    # disk

    def mount_disk(self, disk: CacheTier | None, most_moves: Callable[[], int]) -> None:
        """From now on this is the disk, or there is none. `most_moves`: how many blocks may go
        there until `take_demotions` is called again."""
        self.disk, self._demotion_limit = disk, most_moves
        self._demotions = []

    def take_demotions(self) -> tuple[Demotion, ...]:
        """Blocks to be copied to disk, in this order, before their memory is used for anything
        else. They are in the disk's index already: what cannot be copied is to be dropped there,
        with what follows it. What the disk has evicted again since is left out: its slot is not its
        own any more."""
        moves, self._demotions, self._disk_is_full = self._demotions, [], False
        last = {move.disk_slot: move for move in moves}
        there = self.disk.index if self.disk is not None else ()
        return tuple(
            move for move in moves if move.disk_slot in there and last[move.disk_slot] is move
        )

    def find_on_disk(self, chain: PromptChain, first: int, end: int, now: float) -> "array[int]":
        """The disk blocks of the chain's blocks from `first` on, which is not in memory, up to
        `end`. To load them: `reserve_blocks` to their end, copy, verify, `seal_publication`."""
        if self.disk is None:
            return array("i")
        return self.disk.match_prefix(chain, now, end)[first:]

    # account

    def ledger(self, now: float) -> PoolLedger:
        """Looks at every block that is pinned: O(their number)."""
        pinned = {state: self._pinned_blocks(state) for state in AttachmentState}
        written = {state: self._count_writing_blocks(state) for state in AttachmentState}
        live, doubtful = (
            pinned[AttachmentState.LIVE],
            pinned[AttachmentState.SUSPECT] - pinned[AttachmentState.LIVE],
        )
        counts = {
            PoolBlockState.FREE: self.memory.num_free,
            PoolBlockState.WRITING: written[AttachmentState.LIVE],
            PoolBlockState.IN_USE: len(live),
            PoolBlockState.QUARANTINED: len(doubtful) + written[AttachmentState.SUSPECT],
            PoolBlockState.CACHED: len(self.memory.index) - len(live) - len(doubtful),
        }
        return PoolLedger(self.memory.num_blocks, counts, tuple(self._ledger_entries(now)))

    def check(self) -> None:
        """Raise LedgerError unless the books agree. Looks at everything: for tests."""
        self.memory.check()
        pins: dict[int, int] = {}
        for attachment in self._attachments.values():
            parents = [
                one.parent_block
                for one in attachment.publications.values()
                if one.parent_block != ROOT
            ]
            for block in (
                *(block for pinned in attachment.pins.values() for block in pinned),
                *parents,
            ):
                pins[block] = pins.get(block, 0) + 1
        held = {
            block: self.memory.pin_count(block)
            for block in range(self.memory.num_blocks)
            if self.memory.pin_count(block)
        }
        require_invariant(pins == held, "pins are not what the attachments hold")
        require_invariant(self.ledger(0.0).is_balanced, "the states do not add up to all blocks")

    # the steps underneath

    def _get_live(self, holder: PoolClientId) -> AttachmentRecord:
        attachment = self._attachments.get(holder)
        if attachment is None or attachment.state is not AttachmentState.LIVE:
            raise PoolLedgerError(f"{holder} is not attached")
        return attachment

    def _pin(self, holder: PoolClientId, blocks: "Sequence[int]") -> PinId | None:
        attachment = self._get_live(holder)
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

    def _insert_publication(self, done: Publication, whole: int, now: float) -> None:
        """In order, each under the one before. What another publisher has put there meanwhile is
        used instead."""
        path = self.memory.index.match_prefix(done.chain, done.first_block + whole)
        parent, number = path[-1] if path else ROOT, len(path)
        while number < done.first_block + whole:
            block = done.blocks[number - done.first_block]
            if not self.memory.insert_block(block, done.chain, number, parent, now):
                break
            parent, number = block, number + 1
        used = range(len(path), number)
        for place, block in enumerate(done.blocks, done.first_block):
            if place not in used:
                self.memory.free_block(block)

    def _demote_block(self, block: int) -> None:
        disk, name = self.disk, self.memory.index.block_hash(block)
        if disk is None or not self.memory.has_been_used(block):
            return
        if not self._disk_is_full and disk.index.find_block(name) is None:
            most = self._demotion_limit() - len(self._demotions)
            moves = plan_demotions(self.memory, disk, block, self._now, most) if most > 0 else []
            self._demotions += moves
            self._disk_is_full = not moves  # looking for room costs as much as the prompt is long
        self.dropped_demotions += disk.index.find_block(name) is None

    def _free_publication(self, publication: Publication) -> None:
        for block in publication.blocks:
            self.memory.free_block(block)
        self._unpin((publication.parent_block,) if publication.parent_block != ROOT else ())

    def _pinned_blocks(self, state: AttachmentState) -> set[int]:
        """Blocks that rest pinned by attachments in `state`."""
        found: set[int] = set()
        for attachment in self._attachments.values():
            if attachment.state is state:
                self._collect_pinned_blocks(attachment, found)
        return found

    def _collect_pinned_blocks(self, attachment: AttachmentRecord, found: set[int]) -> None:
        parents = (one.parent_block for one in attachment.publications.values())
        for block in (
            *(block for pinned in attachment.pins.values() for block in pinned),
            *parents,
        ):
            while block != ROOT and block not in found:
                found.add(block)
                block = self.memory.index.parent(block)

    def _count_writing_blocks(self, state: AttachmentState) -> int:
        attachments = (one for one in self._attachments.values() if one.state is state)
        return sum(len(each.blocks) for one in attachments for each in one.publications.values())

    def _ledger_entries(self, now: float) -> Iterator[PoolLedgerEntry]:
        for holder, one in self._attachments.items():
            live = one.state is AttachmentState.LIVE
            held: set[int] = set()
            self._collect_pinned_blocks(one, held)
            written = sum(len(each.blocks) for each in one.publications.values())
            for state, blocks in (
                (PoolBlockState.IN_USE if live else PoolBlockState.QUARANTINED, len(held)),
                (PoolBlockState.WRITING if live else PoolBlockState.QUARANTINED, written),
            ):
                if blocks:
                    yield PoolLedgerEntry(holder, state, blocks, now - one.state_since)
