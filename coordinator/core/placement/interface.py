"""Who serves an attempt. A policy sees an immutable snapshot and answers with nodes, or with None:
wait.

The window of a node is small on purpose: what waits, waits in the coordinator, where deadlines and
fairness have one home and from where a dead node takes little with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.limits import LOCAL_PREFILL_BURST_STEPS
from baton.types import Incarnation, NodeName, Role
from coordinator.core.estimates.cost_model import CostModel

_NO_NAME = NodeName("")
_UNLIMITED_TOKENS = 1 << 62  # tokens
_WINDOW_STEPS = 2  # prompts, or steps: one is computed, the next is there when it ends


@dataclass(frozen=True, slots=True)
class PlacementDemand:
    """What an attempt needs. `context_tokens` of context, `blocks` for them and a little growth;
    about `expected_output_tokens` tokens will follow. `avoided_nodes`: nodes of its last failed
    attempt, taken only if there is no other. `prefix_holder`: a decode node whose cache has the
    whole context, so that there it needs no prefill. `reserved_share`: share of a node's blocks and
    places that this demand must leave to the first class, `headroom_share`: to other tenants of its
    class, with half of the window. `cached_by_node`: how many tokens of the context other caches
    seem to have, by the prefix directory. `max_total_tokens`: tokens of the prompt and of the
    longest output that was asked for."""

    context_tokens: int
    blocks: int
    needs_prefill: bool
    needs_decode: bool
    avoided_nodes: frozenset[Incarnation] = frozenset()
    prefix_holder: Incarnation | None = None
    reserved_share: float = 0.0
    cached_by_node: Mapping[Incarnation, int] = field(default_factory=dict)
    expected_output_tokens: float = 1.0
    headroom_share: float = 0.0
    max_total_tokens: int = 0

    def cached_tokens_on(self, node: Incarnation) -> int:
        """At least the last token of a context is computed anew."""
        held = self.cached_by_node.get(node)
        return min(held, self.context_tokens - 1) if held else 0

    def uncached_tokens_on(self, node: Incarnation) -> int:
        """Tokens that it would have to compute."""
        return (
            1 if node == self.prefix_holder else self.context_tokens - self.cached_tokens_on(node)
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node at this moment. `pending_prefills` prompts are placed there and not computed yet, on
    a prefill node with `uncomputed_tokens`; `window_tokens` are those, but of one prompt at most a
    step's; `free_blocks` in blocks; `refused_from_blocks`: demands of so many blocks were refused;
    `first_class_blocks` of `total_blocks` and `first_class_attempts` of `attempts` are the first
    class's.

    By the coordinator's books: `queued_seconds` of computing are placed there and not done,
    `head_prefill_seconds` of them of the prompt that it has been at since `head_since`;
    `running_attempts` of its attempts have had their first token; `resident_tokens` will be in the
    caches of its sequences; `recent_work`: see `RecentWork`. `max_context_tokens`: the longest
    prompt and output that it can hold, in tokens."""

    incarnation: Incarnation
    role: Role
    max_num_seqs: int
    max_batched_tokens: int
    attempts: int
    pending_prefills: int
    uncomputed_tokens: int
    free_blocks: int
    refused_from_blocks: int | None
    last_placed_serial: int
    window_tokens: int = 0
    total_blocks: int = 0
    first_class_blocks: int = 0
    first_class_attempts: int = 0
    name: NodeName = _NO_NAME
    joined_at: float = 0.0
    queued_seconds: float = 0.0
    head_prefill_seconds: float = 0.0
    head_since: float = 0.0
    running_attempts: int = 0
    resident_tokens: float = 0.0
    recent_work: float = 0.0
    max_context_tokens: int = _UNLIMITED_TOKENS

    def can_hold_request(self, demand: PlacementDemand) -> bool:
        """Whether it could serve the request if it were idle: all of it on a decode node, the
        context and one token on a prefill node."""
        return (
            demand.context_tokens + 1 if self.role is Role.PREFILL else demand.max_total_tokens
        ) <= self.max_context_tokens

    def can_accept_prefill(self, demand: PlacementDemand) -> bool:
        """Blocks are the node's to refuse: what it keeps until a hand-off has committed is not in
        the coordinator's books."""
        if not self.can_hold_request(demand) or self.is_closed_to(demand):
            return False
        return self.pending_prefills < self.max_num_seqs and self._has_window(demand)

    def can_accept_decode(self, demand: PlacementDemand) -> bool:
        """If it is to compute the prompt as well, bursts come to it no faster than to a prefill
        node: whoever comes in between may still pass what waits."""
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
        """Seconds until it has computed what is placed there."""
        if not self.queued_seconds:
            return 0.0
        done = min(max(0.0, now - self.head_since), self.head_prefill_seconds)
        return max(0.0, self.queued_seconds - done)

    def _leaves_room(self, demand: PlacementDemand) -> bool:
        """To the first class first, and of the rest to others of its own. Who needs more blocks
        than the reserve leaves may have them all, and whoever leaves headroom may have them of an
        empty node."""
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
        """Two attempts, or two steps' worth of tokens, and always at least one. A long prompt takes
        one step's share of that, so that short ones can come to the node and pass it."""
        window = 1 if demand.headroom_share else _WINDOW_STEPS
        if self.pending_prefills < window:
            return True
        share = min(demand.uncached_tokens_on(self.incarnation), self.max_batched_tokens)
        return self.window_tokens + share <= window * self.max_batched_tokens

    def is_closed_to(self, demand: PlacementDemand) -> bool:
        return self.refused_from_blocks is not None and demand.blocks >= self.refused_from_blocks


def _round_up_slots(share: float) -> int:
    """So many, rounded up: a share of few places is not less than was promised."""
    return math.ceil(share - 1e-9)


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """What predictions rest on. `work_unit`: what a second of work placed now adds to a node's
    `recent_work`. Sizes of the cache: bytes of a token, tokens of a block. `local_prefill_share`:
    what prompts that a decode node computes itself may add to its steps, of their length; 0: there
    is no bound."""

    now: float
    cost_model: CostModel
    work_unit: float = 1.0
    token_bytes: int = 0
    block_size: int = 16
    local_prefill_share: float = 0.0

    def interleaved_prefill_seconds(self, node: NodeView, seconds: float) -> float:
        """Seconds of a prompt that takes `seconds` alone, on a decode node that computes it beside
        what runs there."""
        if not self.local_prefill_share or not node.running_attempts:
            return seconds
        step = self.cost_model.get_node_costs(node.name).step_seconds(
            node.running_attempts, node.resident_tokens
        )
        at_once = min(seconds, LOCAL_PREFILL_BURST_STEPS * self.local_prefill_share * step)
        return at_once + step + (seconds - at_once) * (1.0 + 1.0 / self.local_prefill_share)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """`predicted_seconds`: predicted seconds of every node that could have taken it, from policies
    that predict."""

    prefill: Incarnation | None
    decode: Incarnation | None
    predicted_seconds: Mapping[Incarnation, float] = field(default_factory=dict, compare=False)


class PlacementPolicy(Protocol):
    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], outlook: PlacementContext
    ) -> NodeChoice | None:
        """Nodes for every role that the demand needs, or None to wait."""
        ...


def choose_prefix_holder(demand: PlacementDemand, nodes: Sequence[NodeView]) -> NodeChoice | None:
    """The decode node whose cache has the whole context, alone, if it has room."""
    if demand.prefix_holder is None:
        return None
    holder = next((node for node in nodes if node.incarnation == demand.prefix_holder), None)
    return (
        NodeChoice(None, holder.incarnation)
        if holder is not None and holder.can_accept_decode(demand)
        else None
    )


def required_roles(demand: PlacementDemand) -> tuple[Role, ...]:
    return tuple(
        role
        for role, wanted in (
            (Role.PREFILL, demand.needs_prefill),
            (Role.DECODE, demand.needs_decode),
        )
        if wanted
    )
