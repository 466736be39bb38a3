"""Keeps what is placed on each node, between two reports of the node.

A *leg* is one attempt's share of one node. Free blocks are what the node last reported, minus the
legs that the report cannot have seen, plus the legs that it saw and that have ended since.

A refusal closes the node to demands of that size until it reports enough room, or until a leg from
before the refusal ends. Only such a leg can have freed anything: otherwise two requests that two
nodes refuse in turn would reopen the nodes for one another for ever.

`ContextCapacity` says how long a request may be: as long as the largest decode node can hold.
Prefill nodes do not limit requests, since a decode node computes what no prefill node can hold. A
node that joins with a smaller cache or `--max-model-len` takes nothing away: requests that it
cannot hold are placed elsewhere. A node that left still counts for a while, so that its restart
does not reject requests as too long. Requests that no present node can hold wait, and block no
others.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from baton.cluster_link.messages import JoinInfo
from baton.limits import ModelBounds
from baton.types import AttemptKey, Incarnation, NodeName, Role
from coordinator.core.estimates.workload import RecentWork
from coordinator.core.membership.node_registry import NodeMember, NodeRegistry
from coordinator.core.placement.interface import NodeView
from coordinator.core.placement.placement_state import PlaceableRequest


@dataclass(slots=True)
class Leg:
    """One attempt's share of one node."""

    tokens_to_compute: int  # prompt tokens to compute there; 0 if another node computes them
    blocks: int  # KV blocks that it will take
    serial: int
    is_first_class: bool = True
    prefill_seconds: float = 0.0  # predicted
    resident_tokens: float = 0.0  # tokens that it will have in the cache, on average
    placed_at: float = 0.0
    is_acknowledged: bool = False  # the node has sent a message about it
    is_reported: bool = False  # the node's last report of free blocks includes it
    is_computed: bool = False  # its prompt is computed


@dataclass(frozen=True, slots=True)
class _NodeClosure:
    """A node that refused a demand, closed to demands of that size."""

    blocks: int  # demands of this many blocks or more are not placed there
    needed_blocks: int  # a report of this many free blocks opens the node
    serial: int  # the end of a leg with a lower serial opens the node


@dataclass(slots=True)
class NodeLoad:
    """What is placed on one node, and what it has reported."""

    legs: dict[AttemptKey, Leg] = field(default_factory=dict)
    reported_free_blocks: int | None = None
    freed_blocks: int = 0
    closure: _NodeClosure | None = None
    last_serial: int = 0
    quiet_reports: int = 0  # heartbeats since work last came to the node or ended there
    last_computed_at: float = 0.0  # when a prompt was last computed there
    view: NodeView | None = None  # the cached snapshot; None after a change


class NodeLoads:
    """What is placed on each node. Snapshots are cached: a placement reads all and changes two."""

    def __init__(self) -> None:
        self._nodes: dict[Incarnation, NodeLoad] = {}
        self._serial = 0
        self._recent = RecentWork()

    def add_node(self, node: Incarnation) -> None:
        self._nodes[node] = NodeLoad()

    def remove_node(self, node: Incarnation) -> list[AttemptKey]:
        """Remove the node and return the attempts that had a leg there."""
        load = self._nodes.pop(node, None)
        self._recent.remove_key(node)
        return list(load.legs) if load else []

    def add_leg(
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
        load = self._load_to_change(node)
        load.legs[key] = Leg(tokens, blocks, self._serial, first_class, seconds, resident, now)
        if seconds:
            self.rescale_recent_work(now)
            self._recent.add_work(node, seconds, now)
        load.last_serial = self._serial
        load.quiet_reports = 0

    def remove_leg(self, node: Incarnation, key: AttemptKey) -> None:
        """The leg has ended on the node or was cancelled. (A cancel arrives before anything that is
        placed later.)"""
        load = self._nodes.get(node)
        leg = load.legs.pop(key, None) if load else None
        if load is None or leg is None:
            return
        load.quiet_reports = 0
        load.view = None
        if leg.is_reported:
            load.freed_blocks += leg.blocks
        if load.closure and leg.serial < load.closure.serial:
            load.closure = None

    def acknowledge_leg(
        self,
        node: Incarnation,
        key: AttemptKey,
        *,
        computed: bool = False,
        now: float | None = None,
    ) -> None:
        """The node has sent a message about the leg; with `computed`, its prompt is computed."""
        load = self._load_to_change(node)
        leg = load.legs.get(key)
        if leg:
            leg.is_acknowledged = True
            if computed and not leg.is_computed and now is not None:
                load.last_computed_at = now
            leg.is_computed |= computed

    def update_free_blocks(self, node: Incarnation, room: int) -> None:
        """Take over the blocks that the node's heartbeat reports as free or evictable."""
        load = self._load_to_change(node)
        self._set_free_blocks(load, room)
        load.quiet_reports += 1
        if load.closure and room >= load.closure.needed_blocks:
            load.closure = None

    def close_node(
        self, node: Incarnation, blocks: int, needed: int, free_blocks: int | None = None
    ) -> None:
        """Place no demand of `blocks` or more there until the node has room for `needed` blocks.
        `free_blocks` is what the node has reported with its refusal, if it has refused."""
        self._serial += 1
        load = self._load_to_change(node)
        if free_blocks is not None:
            self._set_free_blocks(load, free_blocks)
        lowest = min(blocks, load.closure.blocks) if load.closure else blocks
        load.closure = _NodeClosure(lowest, needed, self._serial)

    def attempts_on(self, node: Incarnation) -> Collection[AttemptKey]:
        """Return the attempts with a leg there, in the order in which they were placed."""
        load = self._nodes.get(node)
        return load.legs.keys() if load else ()

    def count_quiet_reports(self, node: Incarnation) -> int:
        """Return the heartbeats since work last came to the node or ended there."""
        return self._nodes[node].quiet_reports

    def get_view(self, node: NodeMember) -> NodeView:
        """Return the node's snapshot for placement. Before its first report all blocks count as
        free, because a joining node holds no work."""
        load = self._nodes[node.incarnation]
        if load.view is None:
            load.view = self._build_view(node, load)
        return load.view

    def rescale_recent_work(self, now: float) -> None:
        """Must be called before snapshots of a moment are read: see `RecentWork`."""
        if self._recent.rescale(now):
            for load in self._nodes.values():
                load.view = None

    def work_unit(self, now: float) -> float:
        """Return what a second of work placed now adds to a node's recent work."""
        return self._recent.work_unit(now)

    def _load_to_change(self, node: Incarnation) -> NodeLoad:
        load = self._nodes[node]
        load.view = None
        return load

    def _build_view(self, node: NodeMember, load: NodeLoad) -> NodeView:
        info = node.info
        room = info.num_blocks if load.reported_free_blocks is None else load.reported_free_blocks
        unseen = sum(leg.blocks for leg in load.legs.values() if not leg.is_reported)
        waiting = [
            leg for leg in load.legs.values() if leg.tokens_to_compute and not leg.is_computed
        ]
        head = next((leg for leg in waiting if leg.prefill_seconds), None)
        return NodeView(
            incarnation=node.incarnation,
            role=info.role,
            max_num_seqs=info.max_num_seqs,
            max_batched_tokens=info.max_batched_tokens,
            attempts=len(load.legs),
            pending_prefills=len(waiting),
            uncomputed_tokens=sum(leg.tokens_to_compute for leg in waiting)
            if info.role is Role.PREFILL
            else 0,
            free_blocks=min(info.num_blocks, room - unseen + load.freed_blocks),
            refused_from_blocks=load.closure.blocks if load.closure else None,
            last_placed_serial=load.last_serial,
            window_tokens=sum(
                min(leg.tokens_to_compute, info.max_batched_tokens) for leg in waiting
            ),
            total_blocks=info.num_blocks,
            first_class_blocks=sum(leg.blocks for leg in load.legs.values() if leg.is_first_class),
            first_class_attempts=sum(leg.is_first_class for leg in load.legs.values()),
            name=info.name,
            joined_at=node.joined_at,
            queued_seconds=sum(leg.prefill_seconds for leg in waiting),
            head_prefill_seconds=head.prefill_seconds if head else 0.0,
            head_since=max(head.placed_at, load.last_computed_at) if head else 0.0,
            running_attempts=len(load.legs) - len(waiting),
            resident_tokens=sum(leg.resident_tokens for leg in load.legs.values()),
            recent_work=self._recent.get_work(node.incarnation),
            max_context_tokens=node.max_context_tokens,
        )

    @staticmethod
    def _set_free_blocks(load: NodeLoad, room: int) -> None:
        load.reported_free_blocks, load.freed_blocks = room, 0
        for leg in load.legs.values():
            leg.is_reported = leg.is_acknowledged


# long enough for a restarted node to load its model
DEPARTED_NODE_MEMORY_SECONDS = 600.0


class ContextCapacity:
    """How many tokens a request may have. With `hands_off`, prefill nodes compute prompts."""

    def __init__(self, registry: NodeRegistry, *, hands_off: bool) -> None:
        self._registry = registry
        self._hands_off = hands_off
        # nodes that have left, and until when each is remembered
        self._departed_nodes: dict[NodeName, tuple[JoinInfo, float]] = {}
        self._bounds: ModelBounds | None = None

    def on_node_joined(self, info: JoinInfo) -> None:
        """Must be called after the node was added to the registry."""
        self._departed_nodes = {
            name: one
            for name, one in self._departed_nodes.items()
            if name != info.name and one[0].model == self._registry.model_identity
        }
        self._compute_bounds()

    def on_node_left(self, info: JoinInfo, now: float) -> None:
        """Must be called after the node was removed from the registry."""
        self._departed_nodes[info.name] = (info, now + DEPARTED_NODE_MEMORY_SECONDS)
        self._compute_bounds()

    def expire_departed_nodes(self, now: float) -> None:
        """Forget nodes that left long ago, unless no node is left."""
        gone = [name for name, (_, until) in self._departed_nodes.items() if until <= now]
        if gone and self._registry.nodes:
            for name in gone:
                del self._departed_nodes[name]
            self._compute_bounds()

    def get_model_bounds(self) -> ModelBounds | None:
        """Return the bounds of requests; None before the first join."""
        return self._bounds

    def can_fit_context(self, role: Role, tokens: int) -> bool:
        """Return whether a node in service of the role can hold so many tokens of one request."""
        return any(
            node.max_context_tokens >= tokens for node in self._registry.nodes_in_service(role)
        )

    def why_too_long(self, record: PlaceableRequest) -> str:
        """Return why no node in service can hold the request; "" if one can, or without decode
        nodes."""
        alone = self._hands_off and record.remaining_tokens <= 1
        if alone and self.can_fit_context(Role.PREFILL, record.context_tokens + 1):
            return ""
        contexts = (
            node.max_context_tokens for node in self._registry.nodes_in_service(Role.DECODE)
        )
        largest = max(contexts, default=record.max_total_tokens)
        if largest >= record.max_total_tokens:
            return ""
        return (
            f"no decode node that is here can hold its {record.max_total_tokens} tokens, the"
            f" largest holds {largest}"
            " (--max-model-len, --kv-memory)"
        )

    def _compute_bounds(self) -> None:
        here = [node.info for node in self._registry.nodes.values()]
        largest = _largest_node([*here, *(info for info, _ in self._departed_nodes.values())])
        self._bounds = ModelBounds(
            vocab_size=largest.vocab_size,
            max_model_len=largest.max_model_len,
            cache_tokens=largest.num_blocks * largest.layout.block_size,
            model_digest=largest.model_digest,
            dtype=largest.layout.dtype,
            quantization=largest.quantization,
            current_max_context=_largest_node(here).max_context_tokens if here else 0,
        )


def _largest_node(infos: Collection[JoinInfo]) -> JoinInfo:
    """Return the largest decode node, or the largest node if there is no decode node."""
    decode = [info for info in infos if info.role is Role.DECODE]
    return max(decode or infos, key=lambda info: info.max_context_tokens)
