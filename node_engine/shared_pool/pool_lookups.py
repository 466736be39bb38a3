"""Looking up in the shared pool before the compute thread hears of an order: on the event loop, so
that no step waits.

Commands of an attempt whose look-up is under way wait behind it; its cancel ends the wait, those
that concern all attempts end every wait, and the end of a writer those of the orders that name it.
Questions for a ledger or a cache wait for nothing and end nothing: an operator's look must not cost
prompts what the pool has of them. A look-up during which this node was told of a publication of its
own is asked again: the compute thread gives own copies up for what was published, so an older
answer may lack what is no longer found here.
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
    command: DecodeCommand | PrefillCommand
    since: float
    queued_commands: list[NodeCommand] = field(default_factory=list)
    num_tries: int = 0


class PoolLookups:
    """`deliver` puts a command on the compute thread's inbox. `root_of` names what a request's
    blocks descend from; `epoch` grows with each publication that was put there; `token_seconds` is
    what computing a token of a prompt takes, None if that is not known yet."""

    def __init__(
        self,
        port: SharedPoolClient | None,
        *,
        root_of: Callable[[AttemptSpec], BlockHash],
        block_size: int,
        epoch: Callable[[], int],
        deliver: Callable[[NodeCommand], None],
        token_seconds: Callable[[], float | None] = lambda: None,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._pool_client = port
        self._root_of = root_of
        self._block_size = block_size
        self._publication_epoch = epoch
        self._deliver_command = deliver
        self._token_seconds = token_seconds
        self._pending: dict[AttemptKey, _PendingLookup] = {}
        self._clock = clock
        self._hits = self._misses = 0
        self._seconds = 0.0  # of all look-ups

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
        """The next command of the stream."""
        key = _attempt_key(command)
        if key is None:
            self._end_affected_lookups(command)
        elif (waiting := self._pending.get(key)) is not None:
            waiting.queued_commands.append(command)
            if isinstance(command, CancelCommand):
                self._end_lookup(waiting, None)
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
        """Wait for no answer any more."""
        for waiting in tuple(self._pending.values()):
            self._end_lookup(waiting, None)

    def _end_affected_lookups(self, command: NodeCommand) -> None:
        """Of the waits that end before a command that is no attempt's."""
        match command:
            case LedgerCommand() | CacheSnapshotCommand():
                pass
            case PeerLostCommand(incarnation):
                for waiting in tuple(self._pending.values()):
                    if isinstance(waiting.command, DecodeCommand) and _is_writer(
                        incarnation, waiting.command
                    ):
                        self._end_lookup(waiting, None)
            case _:
                self.end_all_lookups()

    def _begin_lookup(self, order: DecodeCommand | PrefillCommand) -> None:
        work = order.work
        reusable = (
            0
            if work.request.sampling.prompt_logprobs is not None
            else len(work.context_token_ids) - 1
        )
        try:
            tokens = pack_tokens(work.context_token_ids)
        except (OverflowError, TypeError):  # no ids: the role says so
            reusable = 0
        if reusable <= 0:
            self._deliver_command(order)
            return
        root = self._root_of(work)
        waiting = self._pending[work.key] = _PendingLookup(order, self._clock())
        self._query_pool(
            waiting, root, compute_packed_hashes(root, tokens, self._block_size), tokens, reusable
        )

    def _query_pool(
        self, waiting: _PendingLookup, root: BlockHash, names: bytes, tokens: bytes, most: int
    ) -> None:
        assert self._pool_client is not None
        epoch = self._publication_epoch()
        waiting.num_tries += 1

        def then(hit: PoolHit) -> None:
            if self._pending.get(waiting.command.work.key) is not waiting:
                self._release_hit(hit)
            elif epoch != self._publication_epoch() and waiting.num_tries < _MAX_TRIES:
                self._release_hit(hit)
                self._query_pool(waiting, root, names, tokens, most)
            else:
                self._end_lookup(waiting, hit)

        elsewhere = waiting.command.remote_prefix
        self._pool_client.find_prefix(
            root,
            names,
            tokens,
            most,
            then,
            token_seconds=self._token_seconds(),
            elsewhere=elsewhere,
        )

    def _release_hit(self, hit: PoolHit) -> None:
        assert self._pool_client is not None
        if hit.pin is not None:
            self._pool_client.release_pin(hit.pin)

    def _end_lookup(self, waiting: _PendingLookup, hit: PoolHit | None) -> None:
        del self._pending[waiting.command.work.key]
        found = hit if hit is not None and hit.pin is not None else None
        self._hits += found is not None
        self._misses += found is None
        self._seconds += self._clock() - waiting.since
        self._deliver_command(replace(waiting.command, pool_hit=found))
        for command in waiting.queued_commands:
            self._deliver_command(command)


def _is_writer(incarnation: Incarnation, order: DecodeCommand) -> bool:
    return order.kv_writer is not None and order.kv_writer.incarnation == incarnation


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
