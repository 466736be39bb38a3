"""Who serves an attempt. A policy sees an immutable snapshot and answers with nodes, or with None: wait.

The window of a node is small on purpose: what waits, waits in the coordinator, where deadlines and fairness have one
home and from where a dead node takes little with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.limits import LOCAL_PREFILL_BURST
from baton.types import Incarnation, NodeName, Role
from coordinator.core.cost_model import CostModel

_NO_NAME = NodeName("")
_UNLIMITED = 1 << 62  # tokens
_WINDOW = 2  # prompts, or steps: one is computed, the next is there when it ends


@dataclass(frozen=True, slots=True)
class Demand:
    """What an attempt needs. `tokens` of context, `blocks` for them and a little growth; about `output` tokens will
    follow. `avoid`: nodes of its last failed attempt, taken only if there is no other. `holder`: a decode node whose
    cache has the whole context, so that there it needs no prefill. `reserve`: share of a node's blocks and places that
    this demand must leave to the first class, `headroom`: to other tenants of its class, with half of the window.
    `held`: how many tokens of the context other caches seem to have, by the prefix directory. `length`: tokens of the
    prompt and of the longest output that was asked for."""

    tokens: int
    blocks: int
    prefill: bool
    decode: bool
    avoid: frozenset[Incarnation] = frozenset()
    holder: Incarnation | None = None
    reserve: float = 0.0
    held: Mapping[Incarnation, int] = field(default_factory=dict)
    output: float = 1.0
    headroom: float = 0.0
    length: int = 0

    def held_by(self, node: Incarnation) -> int:
        """At least the last token of a context is computed anew."""
        held = self.held.get(node)
        return min(held, self.tokens - 1) if held else 0

    def lacked_by(self, node: Incarnation) -> int:
        """Tokens that it would have to compute."""
        return 1 if node == self.holder else self.tokens - self.held_by(node)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node at this moment. `computing` prompts are placed there and not computed yet, on a prefill node with
    `uncomputed_tokens`; `window_tokens` are those, but of one prompt at most a step's; `room` in blocks; `closed_from`:
    demands of so many blocks were refused; `first_class_blocks` of `blocks` and `first_class_attempts` of `attempts`
    are the first class's.

    By the coordinator's books: `queued_seconds` of computing are placed there and not done, `head_seconds` of them of
    the prompt that it has been at since `head_since`; `running` of its attempts have had their first token;
    `resident_tokens` will be in the caches of its sequences;
    `recent_work`: see `RecentWork`. `context`: the longest prompt and output that it can hold, in tokens."""

    incarnation: Incarnation
    role: Role
    max_num_seqs: int
    max_batched_tokens: int
    attempts: int
    computing: int
    uncomputed_tokens: int
    room: int
    closed_from: int | None
    last_placed: int
    window_tokens: int = 0
    blocks: int = 0
    first_class_blocks: int = 0
    first_class_attempts: int = 0
    name: NodeName = _NO_NAME
    joined_at: float = 0.0
    queued_seconds: float = 0.0
    head_seconds: float = 0.0
    head_since: float = 0.0
    running: int = 0
    resident_tokens: float = 0.0
    recent_work: float = 0.0
    context: int = _UNLIMITED

    def can_hold(self, demand: Demand) -> bool:
        """Whether it could serve the request if it were idle: all of it on a decode node, the context and one token on
        a prefill node."""
        return (demand.tokens + 1 if self.role is Role.PREFILL else demand.length) <= self.context

    def takes_prefill(self, demand: Demand) -> bool:
        """Blocks are the node's to refuse: what it keeps until a hand-off has committed is not in the coordinator's
        books."""
        if not self.can_hold(demand) or self.is_closed_to(demand):
            return False
        return self.computing < self.max_num_seqs and self._has_window(demand)

    def takes_decode(self, demand: Demand) -> bool:
        """If it is to compute the prompt as well, bursts come to it no faster than to a prefill node: whoever comes in
        between may still pass what waits."""
        if self.attempts >= self.max_num_seqs or not self.can_hold(demand) or self.is_closed_to(demand):
            return False
        if not demand.prefill and not self._has_window(demand):
            return False
        plain = not demand.reserve and not demand.headroom
        return demand.blocks <= self.room if plain else self._leaves_room(demand)

    def takes(self, demand: Demand) -> bool:
        return self.takes_prefill(demand) if self.role is Role.PREFILL else self.takes_decode(demand)

    def wait(self, now: float) -> float:
        """Seconds until it has computed what is placed there."""
        if not self.queued_seconds:
            return 0.0
        done = min(max(0.0, now - self.head_since), self.head_seconds)
        return max(0.0, self.queued_seconds - done)

    def _leaves_room(self, demand: Demand) -> bool:
        """To the first class first, and of the rest to others of its own. Who needs more blocks than the reserve leaves
        may have them all, and whoever leaves headroom may have them of an empty node."""
        blocks = max(0, min(int(demand.reserve * self.blocks), self.blocks - demand.blocks) - self.first_class_blocks)
        reserved = min(_places(demand.reserve * self.max_num_seqs), self.max_num_seqs - 1)
        places = max(0, reserved - self.first_class_attempts)
        if self.attempts:
            blocks += int(demand.headroom * (self.blocks - blocks))
            places += _places(demand.headroom * (self.max_num_seqs - places))
        return demand.blocks <= self.room - blocks and self.attempts < self.max_num_seqs - places

    def _has_window(self, demand: Demand) -> bool:
        """Two attempts, or two steps' worth of tokens, and always at least one. A long prompt takes one step's share of
        that, so that short ones can come to the node and pass it."""
        window = 1 if demand.headroom else _WINDOW
        if self.computing < window:
            return True
        share = min(demand.lacked_by(self.incarnation), self.max_batched_tokens)
        return self.window_tokens + share <= window * self.max_batched_tokens

    def is_closed_to(self, demand: Demand) -> bool:
        return self.closed_from is not None and demand.blocks >= self.closed_from


def _places(share: float) -> int:
    """So many, rounded up: a share of few places is not less than was promised."""
    return math.ceil(share - 1e-9)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What predictions rest on. `unit`: what a second of work placed now adds to a node's `recent_work`. Sizes of the
    cache: bytes of a token, tokens of a block. `share`: what prompts that a decode node computes itself may add to its
    steps, of their length; 0: there is no bound."""

    now: float
    costs: CostModel
    unit: float = 1.0
    token_bytes: int = 0
    block_size: int = 16
    share: float = 0.0

    def beside(self, node: NodeView, seconds: float) -> float:
        """Seconds of a prompt that takes `seconds` alone, on a decode node that computes it beside what runs there."""
        if not self.share or not node.running:
            return seconds
        step = self.costs.node(node.name).step(node.running, node.resident_tokens)
        at_once = min(seconds, LOCAL_PREFILL_BURST * self.share * step)
        return at_once + step + (seconds - at_once) * (1.0 + 1.0 / self.share)


@dataclass(frozen=True, slots=True)
class Choice:
    """`scores`: predicted seconds of every node that could have taken it, from policies that predict."""

    prefill: Incarnation | None
    decode: Incarnation | None
    scores: Mapping[Incarnation, float] = field(default_factory=dict, compare=False)


class Placement(Protocol):
    def choose(self, demand: Demand, nodes: Sequence[NodeView], outlook: Outlook) -> Choice | None:
        """Nodes for every role that the demand needs, or None to wait."""
        ...


def holds_all(demand: Demand, nodes: Sequence[NodeView]) -> Choice | None:
    """The decode node whose cache has the whole context, alone, if it has room."""
    if demand.holder is None:
        return None
    holder = next((node for node in nodes if node.incarnation == demand.holder), None)
    return Choice(None, holder.incarnation) if holder is not None and holder.takes_decode(demand) else None


def needed(demand: Demand) -> tuple[Role, ...]:
    return tuple(role for role, wanted in ((Role.PREFILL, demand.prefill), (Role.DECODE, demand.decode)) if wanted)
