"""Looks up prefixes in the shared pool before commands reach the compute thread.

Look-ups run on the event loop: no step waits for them. Commands of an attempt whose look-up is
pending wait behind it. A
cancel of the attempt ends its look-up; a command that concerns all attempts ends all look-ups; the
loss of a peer ends those of commands that name it as KV writer. Queries for the ledger or the cache
neither wait nor end a look-up: an operator's query must not cost prompts their pool hits.

A look-up during which a publication of this node has ended is repeated: the compute thread gives up
own copies of published blocks, so the older answer may lack blocks that are no longer here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.kv.block_hash import BlockHash, compute_packed_hashes, pack_tokens
from baton.kv.pool_types import PoolHit
from baton.process.clock import Clock, monotonic_clock
from baton.types import AttemptKey, AttemptSpec, Incarnation
from node_engine.core.node_commands import (
    CacheSnapshotCommand,
    CancelCommand,
    DecodeCommand,
    LedgerCommand,
    NodeCommand,
    PeerLostCommand,
    PrefillCommand,
    TicketCommand,
)
from node_engine.shared_pool.pool_client import SharedPoolClient

_MAX_TRIES = 3


@dataclass(slots=True, eq=False)
class _PendingLookup:
    """A command that waits for the pool, and the later commands of the same attempt."""

    command: DecodeCommand | PrefillCommand
    since: float  # clock time, in seconds
    queued_commands: list[NodeCommand] = field(default_factory=list)
    num_tries: int = 0


class PoolLookups:
    """Delivers commands to the compute thread, with the pool hit of their context if it has one."""

    def __init__(
        self,
        pool_client: SharedPoolClient | None,
        *,
        root_of: Callable[[AttemptSpec], BlockHash],
        block_size: int,
        epoch: Callable[[], int],
        deliver: Callable[[NodeCommand], None],
        token_seconds: Callable[[], float | None] = lambda: None,
        clock: Clock = monotonic_clock,
    ) -> None:
        """`deliver` puts a command on the compute thread's inbox.

        `root_of` gives the root hash of a request's block chain. `epoch` is the publication epoch
        of the PoolConnector. `token_seconds` is the time to compute a prompt token, None if not
        known yet.
        """
        self._pool_client = pool_client
        self._root_of = root_of
        self._block_size = block_size
        self._publication_epoch = epoch
        self._deliver_command = deliver
        self._token_seconds = token_seconds
        self._pending: dict[AttemptKey, _PendingLookup] = {}
        self._clock = clock
        self._hits = self._misses = 0
        self._seconds = 0.0  # total duration of all look-ups

    def counters(self) -> dict[str, float]:
        if self._pool_client is None:
            return {}
        results = (("hit", self._hits), ("miss", self._misses))
        found = {
            f'baton_pool_lookups_total{{result="{name}"}}': float(number)
            for name, number in results
        }
        return found | {"baton_pool_lookup_seconds_total": self._seconds}

    def submit_command(self, command: NodeCommand) -> None:
        """Accept the next command of the stream; deliver it now or after a look-up."""
        key = _attempt_key(command)
        if key is None:
            self._end_affected_lookups(command)
        elif (lookup := self._pending.get(key)) is not None:
            lookup.queued_commands.append(command)
            if isinstance(command, CancelCommand):
                self._end_lookup(lookup, None)
            return
        elif (
            isinstance(command, DecodeCommand | PrefillCommand)
            and self._pool_client is not None
            and self._pool_client.is_attached
        ):
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
            case LedgerCommand() | CacheSnapshotCommand():
                pass
            case PeerLostCommand(incarnation):
                for lookup in tuple(self._pending.values()):
                    if isinstance(lookup.command, DecodeCommand) and _is_writer(
                        incarnation, lookup.command
                    ):
                        self._end_lookup(lookup, None)
            case _:
                self.end_all_lookups()

    def _begin_lookup(self, command: DecodeCommand | PrefillCommand) -> None:
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
        root_hash = self._root_of(work)
        lookup = self._pending[work.key] = _PendingLookup(command, self._clock())
        packed_hashes = compute_packed_hashes(root_hash, tokens, self._block_size)
        self._query_pool(lookup, root_hash, packed_hashes, tokens, reusable)

    def _query_pool(
        self,
        lookup: _PendingLookup,
        root_hash: BlockHash,
        packed_hashes: bytes,
        packed_tokens: bytes,
        max_tokens: int,
    ) -> None:
        assert self._pool_client is not None
        epoch = self._publication_epoch()
        lookup.num_tries += 1

        def on_done(hit: PoolHit) -> None:
            if self._pending.get(lookup.command.work.key) is not lookup:
                self._release_hit(hit)
            elif epoch != self._publication_epoch() and lookup.num_tries < _MAX_TRIES:
                self._release_hit(hit)
                self._query_pool(lookup, root_hash, packed_hashes, packed_tokens, max_tokens)
            else:
                self._end_lookup(lookup, hit)

        elsewhere = lookup.command.remote_prefix
        self._pool_client.find_prefix(
            root_hash,
            packed_hashes,
            packed_tokens,
            max_tokens,
            on_done,
            token_seconds=self._token_seconds(),
            elsewhere=elsewhere,
        )

    def _release_hit(self, hit: PoolHit) -> None:
        assert self._pool_client is not None
        if hit.pin is not None:
            self._pool_client.release_pin(hit.pin)

    def _end_lookup(self, lookup: _PendingLookup, hit: PoolHit | None) -> None:
        del self._pending[lookup.command.work.key]
        found = hit if hit is not None and hit.pin is not None else None
        self._hits += found is not None
        self._misses += found is None
        self._seconds += self._clock() - lookup.since
        self._deliver_command(replace(lookup.command, pool_hit=found))
        for command in lookup.queued_commands:
            self._deliver_command(command)


def _is_writer(incarnation: Incarnation, command: DecodeCommand) -> bool:
    return command.kv_writer is not None and command.kv_writer.incarnation == incarnation


def _attempt_key(command: NodeCommand) -> AttemptKey | None:
    match command:
        case DecodeCommand(work) | PrefillCommand(work):
            return work.key
        case TicketCommand(ticket):
            return ticket.key
        case CancelCommand(key):
            return key
        case _:
            return None
