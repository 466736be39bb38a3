"""Holds back the orders whose outputs have a grammar until the grammar is compiled.

Orders pass through here on the event loop, before they reach the compute thread. An attempt with a
grammar waits here while a thread compiles it, or finds it in the cache, and advances it over the
tokens that were emitted before. Later commands of the attempt wait behind its order. The order is
always delivered in the end; the role then takes the constraint, or the error instead of it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    PeerLostNotice,
    PrefillOrder,
    SetRoleOrder,
)
from baton.errors import BatonError, Cancelled, GrammarFailed, NodeLost, StaleMessage
from baton.process import log
from baton.types import AttemptKey, AttemptSpec
from node_engine.core.node_commands import (
    CoordinatorLost,
    NodeCommand,
    NodeJoined,
    get_attempt_key,
)

if TYPE_CHECKING:  # both import llguidance
    from node_engine.structured_output.constraint_factory import ConstraintFactory
    from node_engine.structured_output.grammar_state import GrammarState

_log = log.get_logger("grammar")


@dataclass(slots=True, eq=False)
class _HeldOrder:
    order: DecodeOrder | PrefillOrder
    queued_commands: list[NodeCommand] = field(default_factory=list)
    timeout: asyncio.TimerHandle | None = None


class ConstrainedOrders:
    """The orders that wait for their grammars. Event loop only, except `take_constraint` and
    `drop_constraint`, which are for the compute thread."""

    def __init__(
        self,
        factory: "ConstraintFactory",
        deliver: Callable[[NodeCommand], None],
        timeout_seconds: float,
    ) -> None:
        """`deliver` passes a command on. After `timeout_seconds`, an order is delivered without its
        constraint, and its attempt fails."""
        self._factory = factory
        self._deliver = deliver
        self._timeout_seconds = timeout_seconds
        self._held: dict[AttemptKey, _HeldOrder] = {}
        # Of orders that were delivered and whose attempts have not begun.
        self._made: dict[AttemptKey, GrammarState | BatonError] = {}

    def close(self) -> None:
        """Drop the grammars that wait for a thread; no command is submitted any more."""
        self._factory.close()

    def counters(self) -> dict[str, float]:
        return self._factory.counters()

    def take_constraint(self, work: AttemptSpec) -> "GrammarState | None":
        """Return the constraint of a new attempt, once. Raises BatonError."""
        if work.request.sampling.structured_output is None:
            return None
        made = self._made.pop(work.key, None)
        if made is None:
            raise GrammarFailed("the grammar of the output is not ready")
        if isinstance(made, BatonError):
            raise made
        return made

    def drop_constraint(self, key: AttemptKey) -> None:
        """Forget a constraint that was not taken."""
        self._made.pop(key, None)

    def submit_command(self, command: NodeCommand) -> None:
        """Accept the next command of the stream; deliver it now, or when its grammar is ready."""
        key = get_attempt_key(command)
        held = None if key is None else self._held.get(key)
        if held is not None:
            held.queued_commands.append(command)
            if isinstance(command, CancelOrder):
                self._release(held, Cancelled("the attempt was cancelled"))
            return
        match command:
            case DecodeOrder(work) | PrefillOrder(work) if (
                work.request.sampling.structured_output is not None
            ):
                self._hold(command)
                return
            case PeerLostNotice(incarnation):
                for one in tuple(self._held.values()):
                    writer = one.order.kv_writer if isinstance(one.order, DecodeOrder) else None
                    if writer is not None and writer.incarnation == incarnation:
                        self._release(one, NodeLost("the prefill node has left"))
            case NodeJoined() | CoordinatorLost() | SetRoleOrder():
                self.release_all(StaleMessage("this node has joined anew, or changes its role"))
        self._deliver(command)

    def release_all(self, reason: BatonError) -> None:
        """Deliver all waiting orders now; their attempts end with `reason`."""
        for held in tuple(self._held.values()):
            self._release(held, reason)

    def _hold(self, order: DecodeOrder | PrefillOrder) -> None:
        loop = asyncio.get_running_loop()
        held = self._held[order.work.key] = _HeldOrder(order)
        late = GrammarFailed(
            f"the grammar was not compiled within {self._timeout_seconds:g} s: "
            "make it smaller, or raise --grammar-timeout"
        )
        held.timeout = loop.call_later(self._timeout_seconds, self._release, held, late)
        making = self._factory.submit_work(order.work)
        making.add_done_callback(lambda made: _call_on_loop(loop, self._on_made, held, made))

    def _on_made(self, held: _HeldOrder, made: "Future[GrammarState]") -> None:
        if made.cancelled():  # the node stops, and the order was delivered before
            return
        error = made.exception()
        if error is None:
            self._release(held, made.result())
        elif isinstance(error, BatonError):
            self._release(held, error)
        else:
            _log.error("grammar not compiled", **log.get_error_fields(error))
            self._release(held, GrammarFailed(f"{type(error).__name__} while it was compiled"))

    def _release(self, held: _HeldOrder, outcome: "GrammarState | BatonError") -> None:
        """Deliver a held order and what has queued behind it. Does nothing the second time."""
        key = held.order.work.key
        if self._held.get(key) is not held:
            return
        del self._held[key]
        if held.timeout is not None:
            held.timeout.cancel()
        self._made[key] = outcome
        for command in (held.order, *held.queued_commands):
            self._deliver(command)


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
