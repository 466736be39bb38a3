"""Looking up in the shared pool before the compute thread hears of an order: on the event loop, so that no step waits.

Commands of an attempt whose look-up is under way wait behind it; its cancel ends the wait, those that concern all
attempts end every wait, and the end of a writer those of the orders that name it. Questions for a ledger or a cache
wait for nothing and end nothing: an operator's look must not cost prompts what the pool has of them. A look-up during
which this node was told of a publication of its own is asked again: the compute thread gives own copies up for what was
published, so an older answer may lack what is no longer found here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.block_hash import BlockHash, chain_names, pack_tokens
from baton.clock import Clock, steady
from baton.pool_terms import PoolHit
from baton.types import AttemptKey, Incarnation, Work
from node_engine.core.messages import CacheQuery, Cancel, Command, GiveTicket, LedgerQuery, PeerGone, Prefill, Submit
from node_engine.pool_port import PoolPort

_TRIES = 3


@dataclass(slots=True, eq=False)
class _Waiting:
    order: Submit | Prefill
    since: float
    followers: list[Command] = field(default_factory=list)
    tries: int = 0


class Lookups:
    """`deliver` puts a command on the compute thread's inbox. `root_of` names what a request's blocks descend from;
    `epoch` grows with each publication that was put there; `token_seconds` is what computing a token of a prompt takes,
    None if that is not known yet."""

    def __init__(
        self,
        port: PoolPort | None,
        *,
        root_of: Callable[[Work], BlockHash],
        block_size: int,
        epoch: Callable[[], int],
        deliver: Callable[[Command], None],
        token_seconds: Callable[[], float | None] = lambda: None,
        clock: Clock = steady,
    ) -> None:
        self._port = port
        self._root_of = root_of
        self._block_size = block_size
        self._epoch = epoch
        self._deliver = deliver
        self._token_seconds = token_seconds
        self._waiting: dict[AttemptKey, _Waiting] = {}
        self._clock = clock
        self._hits = self._misses = 0
        self._seconds = 0.0  # of all look-ups

    def counters(self) -> dict[str, float]:
        if self._port is None:
            return {}
        results = (("hit", self._hits), ("miss", self._misses))
        found = {f'baton_pool_lookups_total{{result="{name}"}}': float(number) for name, number in results}
        return found | {"baton_pool_lookup_seconds_total": self._seconds}

    def take(self, command: Command) -> None:
        """The next command of the stream."""
        key = _key_of(command)
        if key is None:
            self._let_go(command)
        elif (waiting := self._waiting.get(key)) is not None:
            waiting.followers.append(command)
            if isinstance(command, Cancel):
                self._end(waiting, None)
            return
        elif isinstance(command, Submit | Prefill) and self._port is not None and self._port.attached:
            self._begin(command)
            return
        self._deliver(command)

    def flush(self) -> None:
        """Wait for no answer any more."""
        for waiting in tuple(self._waiting.values()):
            self._end(waiting, None)

    def _let_go(self, command: Command) -> None:
        """Of the waits that end before a command that is no attempt's."""
        match command:
            case LedgerQuery() | CacheQuery():
                pass
            case PeerGone(incarnation):
                for waiting in tuple(self._waiting.values()):
                    if isinstance(waiting.order, Submit) and _is_writer(incarnation, waiting.order):
                        self._end(waiting, None)
            case _:
                self.flush()

    def _begin(self, order: Submit | Prefill) -> None:
        work = order.work
        reusable = 0 if work.request.sampling.prompt_logprobs is not None else len(work.context) - 1
        try:
            tokens = pack_tokens(work.context)
        except (OverflowError, TypeError):  # no ids: the role says so
            reusable = 0
        if reusable <= 0:
            self._deliver(order)
            return
        root = self._root_of(work)
        waiting = self._waiting[work.key] = _Waiting(order, self._clock())
        self._ask(waiting, root, chain_names(root, tokens, self._block_size), tokens, reusable)

    def _ask(self, waiting: _Waiting, root: BlockHash, names: bytes, tokens: bytes, most: int) -> None:
        assert self._port is not None
        epoch = self._epoch()
        waiting.tries += 1

        def then(hit: PoolHit) -> None:
            if self._waiting.get(waiting.order.work.key) is not waiting:
                self._give_up(hit)
            elif epoch != self._epoch() and waiting.tries < _TRIES:
                self._give_up(hit)
                self._ask(waiting, root, names, tokens, most)
            else:
                self._end(waiting, hit)

        elsewhere = waiting.order.elsewhere
        self._port.find(root, names, tokens, most, then, token_seconds=self._token_seconds(), elsewhere=elsewhere)

    def _give_up(self, hit: PoolHit) -> None:
        assert self._port is not None
        if hit.pin is not None:
            self._port.release(hit.pin)

    def _end(self, waiting: _Waiting, hit: PoolHit | None) -> None:
        del self._waiting[waiting.order.work.key]
        found = hit if hit is not None and hit.pin is not None else None
        self._hits += found is not None
        self._misses += found is None
        self._seconds += self._clock() - waiting.since
        self._deliver(replace(waiting.order, hit=found))
        for command in waiting.followers:
            self._deliver(command)


def _is_writer(incarnation: Incarnation, order: Submit) -> bool:
    return order.writer is not None and order.writer.incarnation == incarnation


def _key_of(command: Command) -> AttemptKey | None:
    match command:
        case Submit(work) | Prefill(work):
            return work.key
        case GiveTicket(ticket):
            return ticket.key
        case Cancel(key):
            return key
        case _:
            return None
