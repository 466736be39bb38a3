"""The pool: what is where, who may read and write it, and when its memory may be used for something else.

    FREE --reserve--> WRITING --seal--> CACHED <--find, last release--> IN_USE
                         |                 +--evict--> FREE
                         +--withdraw, a copy that is not whole, or its publisher proven gone--> FREE

What a doubtful attachment pins or was writing is QUARANTINED: readable by others if it was readable, but not evicted,
until the attachment is proven gone. No byte is touched here; the process that maps the segment asks and obeys.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from kv_pool.core.chain import Chain
from kv_pool.core.disk import Move, demote
from kv_pool.core.holders import Attachment, Found, Granted, Holder, HolderState, PinId, Publication, PublicationId
from kv_pool.core.ledger import LedgerEntry, LedgerError, PoolLedger, PoolState, require
from kv_pool.core.radix_index import ROOT
from kv_pool.core.tier import Tier


class Pool:
    """`memory`: the segment's blocks; `disk`: the file's. `now` is in seconds of a steady clock. A holder that is not
    attached and a pin or publication that it does not have are errors of the caller's (LedgerError, KeyError)."""

    def __init__(self, memory: Tier, disk: Tier | None = None) -> None:
        self.memory = memory
        self.disk = disk
        self.not_moved = 0  # blocks that were to go to disk, when there was no room, or nothing more could be moved
        self._most_moves: Callable[[], int] = lambda: memory.total
        self._moves: list[Move] = []
        self._disk_is_full = False  # for what is to be moved now
        self._now = 0.0
        memory.follow(losing=self._demote)
        self._attachments: dict[Holder, Attachment] = {}
        self._numbers = count(1)

    @property
    def doubtful(self) -> tuple[Holder, ...]:
        """Attachments of which proof of their end is wanted."""
        return tuple(name for name, one in self._attachments.items() if one.state is HolderState.DOUBTFUL)

    def is_live(self, holder: Holder) -> bool:
        attachment = self._attachments.get(holder)
        return attachment is not None and attachment.state is HolderState.LIVE

    @property
    def pins(self) -> int:
        """That anybody holds."""
        return sum(len(one.pins) for one in self._attachments.values())

    def unfinished(self, holder: Holder) -> int:
        """Publications that are neither sealed nor withdrawn."""
        return len(self._live(holder).publications)

    # attachments

    def attach(self, holder: Holder, now: float) -> None:
        require(holder not in self._attachments, f"{holder} is attached already")
        self._attachments[holder] = Attachment(now)

    def doubt(self, holder: Holder, now: float) -> None:
        """Its stream is broken. It asks for nothing any more; what it has stays."""
        self._attachments[holder].state = HolderState.DOUBTFUL
        self._attachments[holder].since = now

    def gone(self, holder: Holder) -> None:
        """It said goodbye after it had let go of the segment, or that was proven: everything it had is free."""
        ending = self._attachments.pop(holder)
        for publication in ending.publications.values():
            self._give_up(publication)
        for pinned in ending.pins.values():
            self._unpin(pinned)

    # readers

    def find(self, holder: Holder, chain: Chain, most_tokens: int, now: float, *, partial: bool = True) -> Found:
        """The longest prefix of `chain`, at most `most_tokens`, that may be read now; it is pinned. With `partial`, the
        block that goes on from there with at least one token more is pinned too."""
        path = self.memory.match(chain, now, most_tokens // chain.block_size)
        more = self.memory.index.beginning(chain, path) if partial else None
        room = most_tokens - len(path) * chain.block_size
        more = (more[0], min(more[1], room)) if more and room > 0 else None
        pinned = (*path[-1:], *([more[0]] if more else ()))
        return Found(self._pin(holder, pinned), path, more)

    def release(self, holder: Holder, pin: PinId) -> None:
        self._unpin(self._live(holder).pins.pop(pin))

    # publishers

    def reserve(self, holder: Holder, chain: Chain, first: int, now: float, end: int | None = None) -> Granted:
        """Places for those full blocks of `chain` that are not here: of `first` to `end`, which the publisher has. None
        if what precedes `first` is not here; the first ones, if there is no room for all. What `take_moves` then
        returns is to be carried out before anything is written to them."""
        attachment = self._live(holder)
        end = len(chain) if end is None else min(end, len(chain))
        path = self.memory.index.match(chain, end)
        start = len(path)
        if start < first or start >= end:
            return Granted(None, start, ())
        self._now = now
        parent = path[-1] if path else ROOT
        if parent != ROOT:
            self.memory.pin(parent)  # before room is made for its children
        blocks = tuple(self.memory.take(end - start, now))
        if not blocks:
            self._unpin((parent,) if parent != ROOT else ())
            return Granted(None, start, ())
        publication = PublicationId(next(self._numbers))
        attachment.publications[publication] = Publication(chain, start, blocks, parent)
        return Granted(publication, start, blocks)

    def writing(self, holder: Holder, publication: PublicationId) -> Publication:
        """What is being written: whose copy is to be verified before it is sealed."""
        return self._live(holder).publications[publication]

    def seal(self, holder: Holder, publication: PublicationId, whole: int, now: float) -> Found:
        """The first `whole` blocks of a publication are verified: they are findable from now on, unless somebody else
        published the same meanwhile. The rest is free again. Returns the chain's blocks up to there, pinned, for the
        publisher to use instead of its own."""
        done = self._live(holder).publications.pop(publication)
        self._insert(done, whole, now)
        path = self.memory.index.match(done.chain, done.first + whole)
        pin = self._pin(holder, path[-1:])
        self._unpin((done.parent,) if done.parent != ROOT else ())
        return Found(pin, path)

    def withdraw(self, holder: Holder, publication: PublicationId) -> None:
        """Its publisher writes there no more."""
        self._give_up(self._live(holder).publications.pop(publication))

    # disk

    def mount(self, disk: Tier | None, most_moves: Callable[[], int]) -> None:
        """From now on this is the disk, or there is none. `most_moves`: how many blocks may go there until `take_moves`
        is called again."""
        self.disk, self._most_moves = disk, most_moves
        self._moves = []

    def take_moves(self) -> tuple[Move, ...]:
        """Blocks to be copied to disk, in this order, before their memory is used for anything else. They are in the
        disk's index already: what cannot be copied is to be dropped there, with what follows it. What the disk has
        evicted again since is left out: its slot is not its own any more."""
        moves, self._moves, self._disk_is_full = self._moves, [], False
        last = {move.disk: move for move in moves}
        there = self.disk.index if self.disk is not None else ()
        return tuple(move for move in moves if move.disk in there and last[move.disk] is move)

    def on_disk(self, chain: Chain, first: int, end: int, now: float) -> "array[int]":
        """The disk blocks of the chain's blocks from `first` on, which is not in memory, up to `end`. To load them:
        `reserve` to their end, copy, verify, `seal`."""
        if self.disk is None:
            return array("i")
        return self.disk.match(chain, now, end)[first:]

    # account

    def ledger(self, now: float) -> PoolLedger:
        """Looks at every block that is pinned: O(their number)."""
        pinned = {state: self._paths(state) for state in HolderState}
        written = {state: self._written(state) for state in HolderState}
        live, doubtful = pinned[HolderState.LIVE], pinned[HolderState.DOUBTFUL] - pinned[HolderState.LIVE]
        counts = {
            PoolState.FREE: self.memory.num_free,
            PoolState.WRITING: written[HolderState.LIVE],
            PoolState.IN_USE: len(live),
            PoolState.QUARANTINED: len(doubtful) + written[HolderState.DOUBTFUL],
            PoolState.CACHED: len(self.memory.index) - len(live) - len(doubtful),
        }
        return PoolLedger(self.memory.total, counts, tuple(self._entries(now)))

    def check(self) -> None:
        """Raise LedgerError unless the books agree. Looks at everything: for tests."""
        self.memory.check()
        pins: dict[int, int] = {}
        for attachment in self._attachments.values():
            parents = [one.parent for one in attachment.publications.values() if one.parent != ROOT]
            for block in (*(block for pinned in attachment.pins.values() for block in pinned), *parents):
                pins[block] = pins.get(block, 0) + 1
        held = {block: self.memory.pins(block) for block in range(self.memory.total) if self.memory.pins(block)}
        require(pins == held, "pins are not what the attachments hold")
        require(self.ledger(0.0).balanced, "the states do not add up to all blocks")

    # the steps underneath

    def _live(self, holder: Holder) -> Attachment:
        attachment = self._attachments.get(holder)
        if attachment is None or attachment.state is not HolderState.LIVE:
            raise LedgerError(f"{holder} is not attached")
        return attachment

    def _pin(self, holder: Holder, blocks: "Sequence[int]") -> PinId | None:
        attachment = self._live(holder)
        if not blocks:
            return None
        for block in blocks:
            self.memory.pin(block)
        pin = PinId(next(self._numbers))
        attachment.pins[pin] = tuple(blocks)
        return pin

    def _unpin(self, blocks: "Sequence[int]") -> None:
        for block in blocks:
            self.memory.unpin(block)

    def _insert(self, done: Publication, whole: int, now: float) -> None:
        """In order, each under the one before. What another publisher has put there meanwhile is used instead."""
        path = self.memory.index.match(done.chain, done.first + whole)
        parent, number = path[-1] if path else ROOT, len(path)
        while number < done.first + whole:
            block = done.blocks[number - done.first]
            if not self.memory.insert(block, done.chain, number, parent, now):
                break
            parent, number = block, number + 1
        used = range(len(path), number)
        for place, block in enumerate(done.blocks, done.first):
            if place not in used:
                self.memory.give_back(block)

    def _demote(self, block: int) -> None:
        disk, name = self.disk, self.memory.index.name(block)
        if disk is None or not self.memory.was_used(block):
            return
        if not self._disk_is_full and disk.index.find(name) is None:
            most = self._most_moves() - len(self._moves)
            moves = demote(self.memory, disk, block, self._now, most) if most > 0 else []
            self._moves += moves
            self._disk_is_full = not moves  # looking for room costs as much as the prompt is long
        self.not_moved += disk.index.find(name) is None

    def _give_up(self, publication: Publication) -> None:
        for block in publication.blocks:
            self.memory.give_back(block)
        self._unpin((publication.parent,) if publication.parent != ROOT else ())

    def _paths(self, state: HolderState) -> set[int]:
        """Blocks that rest pinned by attachments in `state`."""
        found: set[int] = set()
        for attachment in self._attachments.values():
            if attachment.state is state:
                self._add_paths(attachment, found)
        return found

    def _add_paths(self, attachment: Attachment, found: set[int]) -> None:
        parents = (one.parent for one in attachment.publications.values())
        for block in (*(block for pinned in attachment.pins.values() for block in pinned), *parents):
            while block != ROOT and block not in found:
                found.add(block)
                block = self.memory.index.parent(block)

    def _written(self, state: HolderState) -> int:
        attachments = (one for one in self._attachments.values() if one.state is state)
        return sum(len(each.blocks) for one in attachments for each in one.publications.values())

    def _entries(self, now: float) -> Iterator[LedgerEntry]:
        for holder, one in self._attachments.items():
            live = one.state is HolderState.LIVE
            held: set[int] = set()
            self._add_paths(one, held)
            written = sum(len(each.blocks) for each in one.publications.values())
            for state, blocks in (
                (PoolState.IN_USE if live else PoolState.QUARANTINED, len(held)),
                (PoolState.WRITING if live else PoolState.QUARANTINED, written),
            ):
                if blocks:
                    yield LedgerEntry(holder, state, blocks, now - one.since)
