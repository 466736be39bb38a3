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
from coordinator.core.recent_work import RecentWork
from coordinator.core.registry import Node


@dataclass(slots=True)
class Leg:
    """`tokens` to compute there, 0 if another node does; `blocks` it will take, `seconds` of computing by prediction,
    `resident` tokens that it will have in a cache there, on average. `known`: the node has spoken of it. `reported`:
    the node's last report includes it. `computed`: its prompt needs the node's arithmetic no more."""

    tokens: int
    blocks: int
    serial: int
    first_class: bool = True
    seconds: float = 0.0
    resident: float = 0.0
    placed_at: float = 0.0
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
    computed_at: float = 0.0  # when a prompt was last done there
    view: NodeView | None = None  # of this state, if somebody has looked since it changed


class Loads:
    """Views are kept until something changes, because each placement looks at every node and changes two."""

    def __init__(self) -> None:
        self._nodes: dict[Incarnation, NodeLoad] = {}
        self._serial = 0
        self._recent = RecentWork()

    def add_node(self, node: Incarnation) -> None:
        self._nodes[node] = NodeLoad()

    def remove_node(self, node: Incarnation) -> list[AttemptKey]:
        """The attempts that had a leg there."""
        load = self._nodes.pop(node, None)
        self._recent.forget(node)
        return list(load.legs) if load else []

    def place(
        self,
        node: Incarnation,
        key: AttemptKey,
        tokens: int,
        blocks: int,
        *,
        first_class: bool = True,
        seconds: float = 0.0,
        resident: float = 0.0,
        now: float = 0.0,
    ) -> None:
        self._serial += 1
        load = self._changing(node)
        load.legs[key] = Leg(tokens, blocks, self._serial, first_class, seconds, resident, now)
        if seconds:
            self.keep_scale(now)
            self._recent.add(node, seconds, now)
        load.last_serial = self._serial
        load.quiet_reports = 0

    def end(self, node: Incarnation, key: AttemptKey) -> None:
        """The leg is over: ended by the node, or cancelled (the cancel arrives before anything placed after it)."""
        load = self._nodes.get(node)
        leg = load.legs.pop(key, None) if load else None
        if load is None or leg is None:
            return
        load.quiet_reports = 0
        load.view = None
        if leg.reported:
            load.freed += leg.blocks
        if load.closed and leg.serial < load.closed.serial:
            load.closed = None

    def heard_of(self, node: Incarnation, key: AttemptKey, *, computed: bool = False, now: float | None = None) -> None:
        load = self._changing(node)
        leg = load.legs.get(key)
        if leg:
            leg.known = True
            if computed and not leg.computed and now is not None:
                load.computed_at = now
            leg.computed |= computed

    def report(self, node: Incarnation, room: int) -> None:
        """`room`: blocks free or evictable, by heartbeat."""
        load = self._changing(node)
        self._set_room(load, room)
        load.quiet_reports += 1
        if load.closed and room >= load.closed.needed:
            load.closed = None

    def refused(self, node: Incarnation, message: Refused, blocks: int) -> None:
        """A demand of `blocks` was refused, and its leg has ended."""
        self._set_room(self._changing(node), message.free)
        self.close(node, blocks, message.needed)

    def close(self, node: Incarnation, blocks: int, needed: int) -> None:
        """Place no demand of `blocks` or more there before it has room for `needed`."""
        self._serial += 1
        load = self._changing(node)
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
        load = self._nodes[node.incarnation]
        if load.view is None:
            load.view = self._view(node, load)
        return load.view

    def keep_scale(self, now: float) -> None:
        """To be called before the views of a moment are looked at: see `RecentWork`."""
        if self._recent.keep_scale(now):
            for load in self._nodes.values():
                load.view = None

    def unit(self, now: float) -> float:
        """What a second of work placed now adds to a node's recent work."""
        return self._recent.unit(now)

    def _changing(self, node: Incarnation) -> NodeLoad:
        load = self._nodes[node]
        load.view = None
        return load

    def _view(self, node: Node, load: NodeLoad) -> NodeView:
        info = node.info
        room = info.num_blocks if load.room is None else load.room
        unseen = sum(leg.blocks for leg in load.legs.values() if not leg.reported)
        waiting = [leg for leg in load.legs.values() if leg.tokens and not leg.computed]
        head = next((leg for leg in waiting if leg.seconds), None)
        return NodeView(
            incarnation=node.incarnation,
            role=info.role,
            max_num_seqs=info.max_num_seqs,
            max_batched_tokens=info.max_batched_tokens,
            attempts=len(load.legs),
            computing=len(waiting),
            uncomputed_tokens=sum(leg.tokens for leg in waiting) if info.role is Role.PREFILL else 0,
            room=min(info.num_blocks, room - unseen + load.freed),
            closed_from=load.closed.blocks if load.closed else None,
            last_placed=load.last_serial,
            window_tokens=sum(min(leg.tokens, info.max_batched_tokens) for leg in waiting),
            blocks=info.num_blocks,
            first_class_blocks=sum(leg.blocks for leg in load.legs.values() if leg.first_class),
            first_class_attempts=sum(leg.first_class for leg in load.legs.values()),
            name=info.name,
            joined_at=node.joined_at,
            queued_seconds=sum(leg.seconds for leg in waiting),
            head_seconds=head.seconds if head else 0.0,
            head_since=max(head.placed_at, load.computed_at) if head else 0.0,
            running=len(load.legs) - len(waiting),
            resident_tokens=sum(leg.resident for leg in load.legs.values()),
            recent_work=self._recent.of(node.incarnation),
            context=info.context,
        )

    @staticmethod
    def _set_room(load: NodeLoad, room: int) -> None:
        load.room, load.freed = room, 0
        for leg in load.legs.values():
            leg.reported = leg.known
