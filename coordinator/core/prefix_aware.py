"""Placement by predicted completion: what is cached where, what is queued where, and how fast each node is.

First the decode node, then the prefill node that serves it soonest:

    decode    output x step(batch + 1, resident + context)  + transfer of what it lacks  + risk
    prefill   wait + prefill(context - cached, cached)      + transfer over the link to that decode node

`risk` is what recomputing the context would cost, times the share of the expected growth that finds no free block. A
decode node that computes the prompt itself has wait and prefill instead of the transfer. Each pass is linear in nodes.

Affinity is bounded, as in Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads" (2018): a node that
carries more than `BOUND` times the mean stands behind all that do not, whatever it holds; its prefixes then come to be
cached elsewhere too, and their load is spread. A node that has just joined is given more and more over `RAMP` seconds.
Predictions that differ by less than they err do not decide: then the load does.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from baton.types import Role
from coordinator.core.placement import Choice, Demand, NodeView, Outlook, holds_all
from coordinator.core.recent_work import WINDOW

BOUND = 1.25  # of the mean load, from where affinity counts no more
IDLE = 0.05  # a prefill node that computes less of its time than this is never too loaded
RAMP = 10.0  # seconds until a node that has joined is given as much as others
NEAR = 0.0005  # seconds: predictions so close are equal
_LOADED, _AVOIDED = 1, 2
_by_tier_and_time = itemgetter(0, 1)


_Candidate = tuple[int, float, NodeView]  # tier, seconds, node


class PrefixAware:
    def choose(self, demand: Demand, nodes: Sequence[NodeView], outlook: Outlook) -> Choice | None:
        alone = holds_all(demand, nodes)
        if alone is not None:
            return alone
        decode = prefill = None
        margin = outlook.costs.margin
        scores: list[_Candidate] = []
        if demand.decode:
            found = _decode_candidates(demand, nodes, outlook)
            if not found:
                return None
            decode = _best(found, margin, lambda node: _decode_tie(demand, node))
            scores += found
        if demand.prefill:
            found = _prefill_candidates(demand, nodes, decode, outlook)
            if not found:
                return None
            prefill = _best(found, margin, lambda node: (node.recent_work, node.last_placed))
            scores += found
        return Choice(
            prefill.incarnation if prefill else None,
            decode.incarnation if decode else None,
            {node.incarnation: seconds for _, seconds, node in scores},
        )


def _decode_candidates(demand: Demand, nodes: Sequence[NodeView], outlook: Outlook) -> list[_Candidate]:
    of_role = [node for node in nodes if node.role is Role.DECODE]
    crowded = BOUND * sum([node.attempts for node in of_role]) / max(1, len(of_role)) + 1
    costs, now, tokens, output = outlook.costs, outlook.now, demand.tokens, demand.output
    growth = max(1.0, output / outlook.block_size)
    unheld = costs.any_link(tokens * outlook.token_bytes)
    found: list[_Candidate] = []
    for node in of_role:
        if not node.takes_decode(demand):
            continue
        cost, held = costs.node(node.name), demand.held_by(node.incarnation)
        seconds = output * cost.step(node.attempts + 1, node.resident_tokens + tokens)
        if not demand.prefill:
            seconds += node.wait(now) + outlook.beside(node, cost.prefill(tokens - held, held))
        else:
            seconds += costs.any_link((tokens - held) * outlook.token_bytes) if held else unheld
        spare = node.room - demand.blocks
        if spare < growth:
            seconds += (1.0 - spare / growth) * cost.prefill(tokens, 0)
        found.append((_tier(demand, node, node.attempts > crowded, now), seconds, node))
    return found


def _prefill_candidates(
    demand: Demand, nodes: Sequence[NodeView], decode: NodeView | None, outlook: Outlook
) -> list[_Candidate]:
    of_role = [node for node in nodes if node.role is Role.PREFILL]
    mean = sum([node.recent_work for node in of_role]) / max(1, len(of_role))
    loaded = max(BOUND * mean, IDLE * WINDOW * outlook.unit)
    costs, now, tokens = outlook.costs, outlook.now, demand.tokens
    lacking = (tokens - demand.held_by(decode.incarnation)) * outlook.token_bytes if decode is not None else 0
    found: list[_Candidate] = []
    for node in of_role:
        if not node.takes_prefill(demand):
            continue
        held = demand.held_by(node.incarnation)
        seconds = costs.node(node.name).prefill(tokens - held, held)
        seconds += node.wait(now)
        if decode is not None:
            seconds += costs.link(node.name, decode.name, lacking)
        found.append((_tier(demand, node, node.recent_work > loaded, now), seconds, node))
    return found


def _tier(demand: Demand, node: NodeView, loaded: bool, now: float) -> int:
    """Lower is better; a tier is left only if nobody is in it."""
    if node.incarnation in demand.avoid:
        return _AVOIDED
    return _LOADED if loaded or ramps_up(node, now) else 0


def ramps_up(node: NodeView, now: float) -> bool:
    """It has joined a moment ago, and been given its share of that moment."""
    age = now - node.joined_at
    return age < RAMP and node.attempts >= max(1.0, node.max_num_seqs * age / RAMP)


def _decode_tie(demand: Demand, node: NodeView) -> tuple[Any, ...]:
    """A quarter of the context more in the cache counts before the load."""
    quarters = demand.held_by(node.incarnation) * 4 // demand.tokens
    return -quarters, node.attempts / node.max_num_seqs, -node.room, node.last_placed


def _best(found: Sequence[_Candidate], margin: float, tie: Callable[[NodeView], tuple[Any, ...]]) -> NodeView:
    best, fastest, _ = min(found, key=_by_tier_and_time)
    near = fastest * (1.0 + margin) + NEAR
    return min([node for tier, seconds, node in found if tier == best and seconds <= near], key=tie)
