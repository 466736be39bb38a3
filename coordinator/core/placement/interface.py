"""The interface of placement policies: immutable snapshots of nodes in, a choice of nodes out.

The window of a node is small on purpose: requests wait in the coordinator, where deadlines and
fairness are decided in one place, and where the loss of a node affects few of them.

A `PlacementDecision` keeps its predicted latency until the outcome is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.limits import LOCAL_PREFILL_BURST_STEPS
from baton.types import Incarnation, NodeName, Role
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.placement.breakers import NodePair

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


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """The time, the cost model and the units that predictions need."""

    now: float
    cost_model: CostModel
    work_unit: float = 1.0  # what a second of work placed now adds to a node's `recent_work`
    token_bytes: int = 0  # bytes of a token in the KV cache
    block_size: int = 16  # tokens of a KV block
    # most that local prompts may lengthen decode steps; 0: no bound
    local_prefill_share: float = 0.0

    def interleaved_prefill_seconds(self, node: NodeView, seconds: float) -> float:
        """Return the seconds of a prompt on a decode node that also runs sequences; it would take
        `seconds` on an idle one."""
        if not self.local_prefill_share or not node.running_attempts:
            return seconds
        step = self.cost_model.get_node_costs(node.name).step_seconds(
            node.running_attempts, node.resident_tokens
        )
        at_once = min(seconds, LOCAL_PREFILL_BURST_STEPS * self.local_prefill_share * step)
        return at_once + step + (seconds - at_once) * (1.0 + 1.0 / self.local_prefill_share)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes that a policy chose."""

    prefill: Incarnation | None
    decode: Incarnation | None
    # for every candidate, if the policy predicts
    predicted_seconds: Mapping[Incarnation, float] = field(default_factory=dict, compare=False)


class PlacementPolicy(Protocol):
    """Chooses the nodes of an attempt."""

    def choose_nodes(
        self, demand: PlacementDemand, nodes: Sequence[NodeView], context: PlacementContext
    ) -> NodeChoice | None:
        """Return nodes for every role that the demand needs, or None to wait."""
        ...


def choose_prefix_holder(demand: PlacementDemand, nodes: Sequence[NodeView]) -> NodeChoice | None:
    """Return the decode node that caches the whole context, alone, if it has room."""
    if demand.prefix_holder is None:
        return None
    holder = next((node for node in nodes if node.incarnation == demand.prefix_holder), None)
    return (
        NodeChoice(None, holder.incarnation)
        if holder is not None and holder.can_accept_decode(demand)
        else None
    )


def required_roles(demand: PlacementDemand) -> tuple[Role, ...]:
    """Return the roles of which the demand needs a node."""
    return tuple(
        role
        for role, is_needed in (
            (Role.PREFILL, demand.needs_prefill),
            (Role.DECODE, demand.needs_decode),
        )
        if is_needed
    )


class PrefillSite(Enum):
    """Where the prompt is computed."""

    HAND_OFF = "hand_off"  # a prefill node, which hands it off or answers alone
    LOCAL = "local"  # the decode node itself


class PlacementReason(Enum):
    """Why the prompt is computed there."""

    MODE = "mode"  # the mode leaves no choice
    NO_PREFILL_NODE = "no_prefill_node"  # no prefill node serves, although the mode has hand-offs
    # no prefill node that serves can hold the context
    PREFILL_TOO_SMALL = "prefill_too_small"
    PREFIX_CACHED = "held"  # a decode node's cache has the context
    SOONER = "sooner"  # it is predicted to end sooner
    # the other way would go through more of the nodes at which the last attempt failed
    FAILED_BEFORE = "failed"
    DEGRADED = "degraded"  # hand-offs are suspended by a degradation step


@dataclass(frozen=True, slots=True)
class LatencyPrediction:
    """The predicted latency of one attempt, in seconds."""

    queue_seconds: float  # before the prompt is begun
    prefill_seconds: float
    transfer_seconds: float  # of the hand-off, as far as computing does not hide it
    step_seconds: float  # of a decode step
    output_tokens: float
    resident_tokens: float  # tokens that it will have in a cache, on average

    @property
    def ttft_seconds(self) -> float:
        """Predicted time to first token, in seconds."""
        return self.queue_seconds + self.prefill_seconds + self.transfer_seconds


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """The nodes chosen for an attempt, and the latency predictions behind the choice."""

    demand: PlacementDemand
    choice: NodeChoice
    prediction: LatencyPrediction
    views: Sequence[NodeView]  # the nodes as they were seen
    now: float
    blocked_pairs: frozenset[NodePair] = frozenset()  # pairs that were not to be chosen
    prefill_site: PrefillSite = PrefillSite.HAND_OFF
    reason: PlacementReason = PlacementReason.MODE
    # prediction for the other prefill site, if that was possible
    rejected_prediction: LatencyPrediction | None = None


def predict_latency(
    demand: PlacementDemand,
    choice: NodeChoice,
    nodes: Sequence[NodeView],
    context: PlacementContext,
) -> LatencyPrediction:
    """Predict the latency of the demand on the chosen nodes."""
    prefill = decode = None
    for view in nodes:
        if view.incarnation == choice.prefill:
            prefill = view
        elif view.incarnation == choice.decode:
            decode = view
    costs, tokens, output = context.cost_model, demand.context_tokens, demand.expected_output_tokens
    queue = compute = transfer = step = 0.0
    computing_node = prefill or decode
    if computing_node is not None:
        cached_tokens = (
            demand.cached_tokens_on(computing_node.incarnation)
            if computing_node.incarnation != demand.prefix_holder
            else tokens - 1
        )
        queue = computing_node.queue_wait_seconds(context.now)
        compute = costs.get_node_costs(computing_node.name).prefill_seconds(
            tokens - cached_tokens, cached_tokens
        )
        if prefill is None:
            compute = context.interleaved_prefill_seconds(computing_node, compute)
    if prefill is not None and decode is not None:
        missing_tokens = tokens - demand.cached_tokens_on(decode.incarnation)
        transfer = costs.transfer_seconds(
            prefill.name, decode.name, missing_tokens * context.token_bytes
        )
    resident = tokens + output / 2
    if decode is not None:
        step = costs.get_node_costs(decode.name).step_seconds(
            decode.attempts + 1, decode.resident_tokens + resident
        )
    return LatencyPrediction(queue, compute, transfer, step, output, resident)
