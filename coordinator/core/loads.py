"""What the coordinator has placed on each node and not seen end: its own books, between two reports of a node.

A *leg* is one attempt's share of one node. Room on a node is what it last reported, less the legs which that report
cannot have seen, plus the legs which it saw and which have ended since.

A refusal closes the node to demands of that size until it reports enough room or a leg that was there before the
refusal ends. Only such a leg can have freed anything: two requests that are refused in turn by two nodes would
otherwise reopen them for one another for ever.
"""

from dataclasses import dataclass, field

from baton.types import AttemptKey, Incarnation, Role
from coordinator.core.messages import Refused
from coordinator.core.placement import NodeView
from coordinator.core.registry import Node


@dataclass(slots=True)
class Leg:
    """`tokens` of context to compute there, `blocks` it will take. `known`: the node has spoken of it. `reported`: the
    node's last report includes it. `computed`: its prompt needs the node's arithmetic no more."""

    tokens: int
    blocks: int
    serial: int
    first_class: bool
    known: bool = False
    reported: bool = False
    computed: bool = False


@dataclass(frozen=True, slots=True)
class _Closed:
    """Demands of `blocks` and more, by our estimate, are not placed until the node reports room for `needed`, by its
    own, or a leg with a lower serial ends."""

    blocks: int
    needed: int
    serial: int


@dataclass(slots=True)
class NodeLoad:
    legs: dict[AttemptKey, Leg] = field(default_factory=dict)
    room: int | None = None
    freed: int = 0
    closed: _Closed | None = None
    last_serial: int = 0
    quiet_reports: int = 0  # since work last came or ended


class Loads:
    def __init__(self) -> None:
        self._nodes: dict[Incarnation, NodeLoad] = {}
        self._serial = 0

    def add_node(self, node: Incarnation) -> None:
        self._nodes[node] = NodeLoad()

    def remove_node(self, node: Incarnation) -> list[AttemptKey]:
        """The attempts that had a leg there."""
        load = self._nodes.pop(node, None)
        return list(load.legs) if load else []

    def place(self, node: Incarnation, key: AttemptKey, tokens: int, blocks: int, *, first_class: bool = True) -> None:
        self._serial += 1
        load = self._nodes[node]
        load.legs[key] = Leg(tokens, blocks, self._serial, first_class)
        load.last_serial = self._serial
        load.quiet_reports = 0

    def end(self, node: Incarnation, key: AttemptKey) -> None:
        """The leg is over: ended by the node, or cancelled (the cancel arrives before anything placed after it)."""
        load = self._nodes.get(node)
        leg = load.legs.pop(key, None) if load else None
        if load is None or leg is None:
            return
        load.quiet_reports = 0
        if leg.reported:
            load.freed += leg.blocks
        if load.closed and leg.serial < load.closed.serial:
            load.closed = None

    def heard_of(self, node: Incarnation, key: AttemptKey, *, computed: bool = False) -> None:
        leg = self._nodes[node].legs.get(key)
        if leg:
            leg.known = True
            leg.computed |= computed

    def report(self, node: Incarnation, room: int) -> None:
        """`room`: blocks free or evictable, by heartbeat."""
        load = self._nodes[node]
        self._set_room(load, room)
        load.quiet_reports += 1
        if load.closed and room >= load.closed.needed:
            load.closed = None

    def refused(self, node: Incarnation, message: Refused, blocks: int) -> None:
        """A demand of `blocks` was refused, and its leg has ended."""
        self._set_room(self._nodes[node], message.free)
        self.close(node, blocks, message.needed)

    def close(self, node: Incarnation, blocks: int, needed: int) -> None:
        """Place no demand of `blocks` or more there before it has room for `needed`."""
        self._serial += 1
        load = self._nodes[node]
        lowest = min(blocks, load.closed.blocks) if load.closed else blocks
        load.closed = _Closed(lowest, needed, self._serial)

    def attempts(self, node: Incarnation) -> int:
        load = self._nodes.get(node)
        return len(load.legs) if load else 0

    def placed_on(self, node: Incarnation) -> list[AttemptKey]:
        """In the order in which they were placed."""
        load = self._nodes.get(node)
        return list(load.legs) if load else []

    def quiet_reports(self, node: Incarnation) -> int:
        """How often the node has reported since work last came to it or ended there."""
        return self._nodes[node].quiet_reports

    def busy(self) -> set[Incarnation]:
        return {node for node, load in self._nodes.items() if load.legs}

    def view(self, node: Node) -> NodeView:
        """A snapshot for placement. Room before the first report: everything, since a joining node holds no work."""
        load, info = self._nodes[node.incarnation], node.info
        room = info.num_blocks if load.room is None else load.room
        unseen = sum(leg.blocks for leg in load.legs.values() if not leg.reported)
        to_compute = [leg.tokens for leg in load.legs.values() if not leg.computed]
        return NodeView(
            incarnation=node.incarnation,
            role=info.role,
            max_num_seqs=info.max_num_seqs,
            max_batched_tokens=info.max_batched_tokens,
            attempts=len(load.legs),
            computing=len(to_compute) if info.role is Role.PREFILL else 0,
            uncomputed_tokens=sum(to_compute) if info.role is Role.PREFILL else 0,
            room=min(info.num_blocks, room - unseen + load.freed),
            closed_from=load.closed.blocks if load.closed else None,
            last_placed=load.last_serial,
            window_tokens=sum(min(tokens, info.max_batched_tokens) for tokens in to_compute),
            blocks=info.num_blocks,
            first_class_blocks=sum(leg.blocks for leg in load.legs.values() if leg.first_class),
            first_class_attempts=sum(leg.first_class for leg in load.legs.values()),
        )

    @staticmethod
    def _set_room(load: NodeLoad, room: int) -> None:
        load.room, load.freed = room, 0
        for leg in load.legs.values():
            leg.reported = leg.known
