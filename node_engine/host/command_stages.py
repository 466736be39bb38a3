"""What a command passes on the event loop before it reaches the compute thread's inbox.

First the grammar of its output is compiled, then its context is looked up in the shared pool. A
node without a tokenizer or a pool leaves out the stage.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import NodeLost
from node_engine.core.node_commands import NodeCommand
from node_engine.shared_pool.pool_connector import PoolLookups
from node_engine.structured_output.constrained_orders import ConstrainedOrders


@dataclass(frozen=True, slots=True)
class CommandStages:
    """The stages of one node. Event loop only."""

    lookups: PoolLookups | None
    constrained_orders: ConstrainedOrders | None
    submit_command: Callable[[NodeCommand], None]  # accepts the next command of the stream

    def release_all(self) -> None:
        """Deliver all commands that wait, because the node stops."""
        if self.constrained_orders is not None:
            self.constrained_orders.release_all(NodeLost("this node is stopping"))
        if self.lookups is not None:
            self.lookups.end_all_lookups()

    def close(self) -> None:
        """End the work that commands wait for; none is submitted any more."""
        if self.constrained_orders is not None:
            self.constrained_orders.close()

    def counters(self) -> dict[str, float]:
        return (self.lookups.counters() if self.lookups else {}) | (
            self.constrained_orders.counters() if self.constrained_orders else {}
        )
