"""Keeps what is placed on each node between two reports of the node, and says what fits there.

A *leg* is one attempt's share of one node. Free blocks are what the node last reported, minus the
legs that the report cannot have seen, plus the legs that it saw and that have ended since.

A refusal closes the node to demands of that size until it reports enough room, or until a leg from
before the refusal ends. Only such a leg can have freed anything: otherwise two requests that two
nodes refuse in turn would reopen the nodes for one another for ever.

Policies read a node as a `NodeView`, an immutable snapshot, which says whether it can accept a
`PlacementDemand`. The window of a node is small on purpose: requests wait in the coordinator, where
deadlines and fairness are decided in one place, and where the loss of a node affects few of them.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from baton.types import AttemptKey, Incarnation, NodeName, Role
from coordinator.core.estimates.workload import RecentWork
from coordinator.core.membership.node_registry import NodeMember

_NO_NAME = NodeName("")
_UNLIMITED_TOKENS = 1 << 62  # tokens
_WINDOW_STEPS = 2  # prompts, or steps: one is computed, the next is there when it ends


@dataclass(frozen=True, slots=True)
class PlacementDemand:
    """What an attempt needs of the nodes that will serve it."""

    context_tokens: int  # tokens of the prompt and of what was emitted so far
    blocks: int  # KV blocks for the context and a little growth
    needs_prefill: bool
    needs_decode: bool
    # nodes of the last failed attempt, chosen only if there is no other
    avoided_nodes: frozenset[Incarnation] = frozenset()
    # a decode node that caches the whole context: no prefill leg needed
    prefix_holder: Incarnation | None = None
    reserved_share: float = 0.0  # share of a node's blocks and slots to leave to the first class
    # context tokens that each node's cache seems to have, by the prefix directory
    cached_by_node: Mapping[Incarnation, int] = field(default_factory=dict)
    expected_output_tokens: float = 1.0
    # share to leave to other tenants of the class, with half of the window
    headroom_share: float = 0.0
    max_total_tokens: int = 0  # tokens of the prompt and of the longest output asked for

    def cached_tokens_on(self, node: Incarnation) -> int:
        """Return the usable cached tokens; the last context token is always computed."""
        cached_tokens = self.cached_by_node.get(node)
        return min(cached_tokens, self.context_tokens - 1) if cached_tokens else 0

    def uncached_tokens_on(self, node: Incarnation) -> int:
        """Return the context tokens that the node would have to compute."""
        return (
            1 if node == self.prefix_holder else self.context_tokens - self.cached_tokens_on(node)
        )

    @property
    def required_roles(self) -> tuple[Role, ...]:
        """The roles of which the demand needs a node."""
        needed = ((Role.PREFILL, self.needs_prefill), (Role.DECODE, self.needs_decode))
        return tuple(role for role, is_needed in needed if is_needed)


@dataclass(frozen=True, slots=True)
class NodeView:
    """An immutable snapshot of one node, from its reports and from what is placed there."""

    incarnation: Incarnation
    role: Role
    max_num_seqs: int
    max_batched_tokens: int
    attempts: int  # attempts placed there that have not ended
    pending_prefills: int  # prompts placed there and not computed yet
    uncomputed_tokens: int  # tokens of these prompts; 0 on a decode node
    free_blocks: int  # by the last report and what was placed and ended since
    refused_from_blocks: int | None  # demands of this many blocks or more were refused
    last_placed_serial: int  # orders nodes by when they last got work
    window_tokens: int = 0  # tokens of pending prompts, each counted up to one step's
    total_blocks: int = 0
    first_class_blocks: int = 0  # blocks of first-class attempts
    first_class_attempts: int = 0
    name: NodeName = _NO_NAME
    joined_at: float = 0.0
    # predicted seconds of prompts that wait or are being computed there
    queued_seconds: float = 0.0
    head_prefill_seconds: float = 0.0  # predicted seconds of the prompt that is being computed
    head_since: float = 0.0  # when the node began with that prompt
    running_attempts: int = 0  # attempts whose prompt is computed
    resident_tokens: float = 0.0  # expected tokens in the caches of its sequences
    recent_work: float = 0.0  # see `RecentWork`
    max_context_tokens: int = _UNLIMITED_TOKENS  # longest prompt and output that it can hold

    def can_hold_request(self, demand: PlacementDemand) -> bool:
        """Return whether the idle node could hold the request: the context and one token on a
        prefill node, prompt and output on a decode node."""
        return (
            demand.context_tokens + 1 if self.role is Role.PREFILL else demand.max_total_tokens
        ) <= self.max_context_tokens

    def can_accept_prefill(self, demand: PlacementDemand) -> bool:
        """Return whether the node has room in its window for the prompt. Blocks are not checked:
        the coordinator does not know what the node keeps until hand-offs commit, so the node
        refuses."""
        if not self.can_hold_request(demand) or self.is_closed_to(demand):
            return False
        return self.pending_prefills < self.max_num_seqs and self._has_window(demand)

    def can_accept_decode(self, demand: PlacementDemand) -> bool:
        """Return whether the node has a slot and blocks for the attempt. If it is to compute the
        prompt too, the window of a prefill node applies, so that later short prompts can overtake.
        """
        if (
            self.attempts >= self.max_num_seqs
            or not self.can_hold_request(demand)
            or self.is_closed_to(demand)
        ):
            return False
        if not demand.needs_prefill and not self._has_window(demand):
            return False
        plain = not demand.reserved_share and not demand.headroom_share
        return demand.blocks <= self.free_blocks if plain else self._leaves_room(demand)

    def can_accept(self, demand: PlacementDemand) -> bool:
        return (
            self.can_accept_prefill(demand)
            if self.role is Role.PREFILL
            else self.can_accept_decode(demand)
        )

    def queue_wait_seconds(self, now: float) -> float:
        """Return the predicted seconds until the node has computed the prompts placed there."""
        if not self.queued_seconds:
            return 0.0
        done = min(max(0.0, now - self.head_since), self.head_prefill_seconds)
        return max(0.0, self.queued_seconds - done)

    def _leaves_room(self, demand: PlacementDemand) -> bool:
        """Return whether the reserve of the first class and the headroom stay free. A request that
        needs more blocks than the reserve leaves may have them all, and one that leaves headroom
        may use an empty node fully."""
        blocks = max(
            0,
            min(int(demand.reserved_share * self.total_blocks), self.total_blocks - demand.blocks)
            - self.first_class_blocks,
        )
        reserved = min(
            _round_up_slots(demand.reserved_share * self.max_num_seqs), self.max_num_seqs - 1
        )
        places = max(0, reserved - self.first_class_attempts)
        if self.attempts:
            blocks += int(demand.headroom_share * (self.total_blocks - blocks))
            places += _round_up_slots(demand.headroom_share * (self.max_num_seqs - places))
        return (
            demand.blocks <= self.free_blocks - blocks
            and self.attempts < self.max_num_seqs - places
        )

    def _has_window(self, demand: PlacementDemand) -> bool:
        """Return whether the window has room: two prompts, or two steps' worth of tokens. A long
        prompt counts as one step's tokens, so that short prompts can be placed behind it."""
        window = 1 if demand.headroom_share else _WINDOW_STEPS
        if self.pending_prefills < window:
            return True
        share = min(demand.uncached_tokens_on(self.incarnation), self.max_batched_tokens)
        return self.window_tokens + share <= window * self.max_batched_tokens

    def is_closed_to(self, demand: PlacementDemand) -> bool:
        return self.refused_from_blocks is not None and demand.blocks >= self.refused_from_blocks


def _round_up_slots(share: float) -> int:
    """Round up, so that a share of few slots is not less than was promised."""
    return math.ceil(share - 1e-9)


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
