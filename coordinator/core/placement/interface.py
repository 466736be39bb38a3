"""The interface of placement policies: immutable snapshots of nodes in, a choice of nodes out.

A `PlacementDecision` keeps its predicted latency until the outcome is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from baton.limits import LOCAL_PREFILL_BURST_STEPS
from baton.types import Incarnation, NodeName, Request, Role
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.membership.node_registry import RequestLength
from coordinator.core.membership.prefix_directory import PromptBlockHashes
from coordinator.core.placement.breakers import NodePair
from coordinator.core.placement.node_loads import NodeView, PlacementDemand


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


FAILED_BEFORE, RAMPING_UP, BLOCKED_PAIR = "failed before", "newcomer", "kept apart"


class ConsideredNode(NamedTuple):
    """One candidate as placement saw it."""

    node: NodeName
    role: Role
    attempts: int  # attempts placed there
    uncomputed_tokens: int  # prompt tokens placed there and not computed
    free_blocks: int
    is_eligible: bool
    is_chosen: bool
    cached_tokens: int  # context tokens that its cache seems to have
    predicted_seconds: float | None  # None if the policy predicts nothing
    objection: str  # FAILED_BEFORE, RAMPING_UP, BLOCKED_PAIR or ""


class PlaceableRequest(RequestLength, Protocol):
    """A request that waits for its nodes, as placement sees it.

    Placement sets the attributes that are not properties.
    """

    prompt_block_hashes: PromptBlockHashes | None  # None until placement was tried once
    cached_at_first_placement: int  # prompt tokens that some cache had at the first placement

    @property
    def request(self) -> Request: ...

    @property
    def deadline(self) -> float: ...

    @property
    def emitted_token_ids(self) -> list[int]: ...

    @property
    def awaits_prompt_logprobs(self) -> bool: ...

    @property
    def prefix_holder(self) -> Incarnation | None: ...

    @property
    def probe_node(self) -> Incarnation | None: ...

    @property
    def avoided_nodes(self) -> frozenset[Incarnation]: ...
