"""Brings nodes to the roles that the ratio asks for: drain, order, probe, and into service.

Soft state: a coordinator that restarts has no target, and takes each node for what its join says. A node that restarts
in its first role while there is a target is switched again.
"""

from collections import Counter, deque
from collections.abc import Callable

from baton.errors import BatonError, Cancelled, Drained, InvalidRequest, Stalled
from baton.ratio import Split, possible_splits, told
from baton.types import FinishReason, NodeName, Request, RequestId, Role, SamplingParams
from coordinator.core.flip import ORDER_PATIENCE, PROBE_TIMEOUT, Flip, Phase
from coordinator.core.messages import Send, SetRole, Switched
from coordinator.core.ratio import Standing, moves, other
from coordinator.core.registry import Node, Registry
from coordinator.core.requests import RequestTable
from coordinator.core.tenants import OURS

KEPT = 64  # reports of changes that are over
MOST_AT_ONCE = 64  # nodes between two roles
BARE_PATIENCE = 5.0  # seconds that a role may have nobody before a node of the other one takes it
_FIRST_REST, _LONGEST_REST = 1.0, 30.0  # seconds after a change of a node that failed
_OUTPUT_TOKENS = 2  # of a probe: one by prefill, one by decode
_PROBE_BLOCKS = 2

Drop = Callable[[Node, BatonError, float], None]


class Switches:
    """`drop` gives up a node. Inputs only note what has happened; `step`, after each of them, acts on it."""

    def __init__(self, registry: Registry, table: RequestTable, mode: str, drop: Drop) -> None:
        self.target: Split | None = None
        self.generation = 0  # counts the targets
        self.flips: dict[NodeName, Flip] = {}
        self.over: deque[Switched] = deque(maxlen=KEPT)
        self.counts: Counter[tuple[str, str]] = Counter()  # role, outcome
        self._registry = registry
        self._table = table
        self._mode = mode
        self._drop = drop
        self._patience = 0.0
        self._failures: Counter[NodeName] = Counter()
        self._rests: dict[NodeName, float] = {}
        self._bare: dict[Role, float | None] = {}  # roles that nobody has: how long that is borne, None: no longer
        self._stale = False

    # inputs

    def aim(self, target: Split, patience: float, now: float) -> None:
        """From now on, instead of any target before. What a node still does after `patience` seconds is placed again
        elsewhere. Raises InvalidRequest."""
        nodes = len(self._standings(now))
        possible = possible_splits(nodes, self._mode)
        if target not in possible:
            raise InvalidRequest(
                f"ratio {target} is not possible with {nodes} live nodes in mode {self._mode}: "
                f"possible are {told(possible)}",
                param="ratio",
            )
        self.target, self._patience = target, patience
        self.generation += 1
        self._failures.clear()
        self._rests.clear()
        self._stale = True

    def joined(self, node: Node, now: float) -> None:
        flip = self.flips.get(node.info.name)
        self._stale = True
        if flip is None:
            return
        if flip.phase is Phase.ORDERED and node.info.role is flip.to:
            flip.join(node.incarnation, now)
            self._probe(flip)
        else:
            self._finish(flip, "lost", now, f"it came back as {node.info.role.value}")

    def gone(self, node: Node, now: float) -> None:
        """The end of its stream is how a node that was ordered to switch begins to join anew."""
        flip = self.flips.get(node.info.name)
        self._stale = True
        if flip is not None and flip.phase is not Phase.ORDERED:
            self._finish(flip, "lost", now, f"the node was lost while {flip.phase.value}")

    def heard(self) -> None:
        """A node has reported: it may serve now, and another may move."""
        self._stale |= self.target is not None and not self.settled

    def reconsider(self) -> None:
        """Who serves has changed."""
        self._stale = True

    def due(self, now: float) -> None:
        for name in self._registry.switching.due(now):
            flip = self.flips[name]
            error = Drained(f"node {name} takes the role {flip.to.value}")
            self._table.vacate(flip.incarnation, error, now)
        for flip in [flip for flip in self.flips.values() if flip.due is not None and flip.due <= now]:
            if flip.phase is Phase.ORDERED:
                self._lose(flip, now)
            else:
                self._probe(flip)
        for name in [name for name, until in self._rests.items() if until <= now]:
            del self._rests[name]
            self._stale = True
        for role in [role for role, until in self._bare.items() if until is not None and until <= now]:
            self._bare[role] = None
            self._stale = True

    def next(self) -> float | None:
        dues = (flip.due for flip in self.flips.values())
        times = (self._registry.switching.next(), *dues, *self._rests.values(), *self._bare.values())
        return min((time for time in times if time is not None), default=None)

    def step(self, now: float) -> None:
        """Act on what has happened since."""
        if self._table.probed:
            self._take_probed(now)
        if not (self.flips or self._stale):
            return
        if self._stale and self.target is not None:
            self._reconcile(self.target, now)
        for flip in [flip for flip in self.flips.values() if flip.phase is Phase.DRAINING]:
            if not self._table.loads.attempts(flip.incarnation):
                self._order(flip, now)
        for flip in [flip for flip in self.flips.values() if flip.phase is Phase.PROBING and flip.probe is None]:
            self._send_probe(flip, now)

    # views

    def expects_end_of(self, node: Node) -> bool:
        """The node was told to end its stream and join anew."""
        flip = self.flips.get(node.info.name)
        return flip is not None and flip.phase is Phase.ORDERED and flip.incarnation == node.incarnation

    @property
    def settled(self) -> bool:
        """The nodes have the roles that were asked for, and serve in them or are kept from it by others."""
        have = self.split()
        return self.target is None or (not self.flips and have == self.target)

    def split(self) -> Split:
        """Live nodes by the role that they have, but for those on their way to another."""
        still = [node for node in self._registry.nodes.values() if node.info.name not in self.flips]
        have = Counter(node.info.role for node in still if not node.leaving)
        return Split(have[Role.PREFILL], have[Role.DECODE])

    def heading(self, now: float) -> Split:
        """Live nodes by the role that they have or are on their way to."""
        bound = Counter(standing.role for standing in self._standings(now))
        return Split(bound[Role.PREFILL], bound[Role.DECODE])

    def possible(self, now: float) -> list[Split]:
        return possible_splits(len(self._standings(now)), self._mode)

    # inside

    def _reconcile(self, target: Split, now: float) -> None:
        standings = self._standings(now)
        for role in Role:
            if target.of(role) and all(node.role is not role for node in standings):
                self._bare.setdefault(role, now + BARE_PATIENCE)
            else:
                self._bare.pop(role, None)
        wanted = moves(target, standings, [role for role, until in self._bare.items() if until is None])
        self._stale = bool(wanted)  # what follows from it is seen at the next input
        for move in wanted[: max(0, MOST_AT_ONCE - len(self.flips))]:
            flip = self.flips.get(move.name)
            if flip is not None and flip.phase is Phase.DRAINING:
                self._finish(flip, "recalled", now)
                continue
            if flip is not None:
                self._finish(flip, "superseded", now)
            node = self._registry.called(move.name)
            assert node is not None, "what is fixed does not move"
            self._begin(node, move.to, now)

    def _standings(self, now: float) -> list[Standing]:
        serving = {node.incarnation for node in self._registry.in_service()}
        found = [self._standing(node, node.incarnation in serving) for node in self._registry.nodes.values()]
        away = [flip for flip in self.flips.values() if self._registry.called(flip.node) is None]
        return [
            *(standing for standing in found if standing is not None),
            *(Standing(flip.node, flip.to, serves=False, moving=True, fixed=True) for flip in away),
        ]

    def _standing(self, node: Node, serves: bool) -> Standing | None:
        """None: it is leaving the cluster."""
        name, load = node.info.name, self._table.loads.attempts(node.incarnation)
        flip = self.flips.get(name)
        if flip is not None:
            leaving, fixed = flip.phase is Phase.DRAINING, flip.phase is Phase.ORDERED
            return Standing(name, flip.to, serves=False, moving=True, leaving=leaving, fixed=fixed, load=load)
        if node.leaving:
            return None
        fixed = name in self._rests or not (serves or name in self._registry.drains)
        return Standing(name, node.info.role, serves=serves, fixed=fixed, load=load)

    def _begin(self, node: Node, to: Role, now: float) -> None:
        name = node.info.name
        self.flips[name] = Flip(name, node.incarnation, other(to), to, self.generation, now)
        self._registry.switching.begin(name, now + self._patience)
        self._table.placeable = True

    def _order(self, flip: Flip, now: float) -> None:
        flip.order(now)
        self._registry.switching.begin(flip.node, None)
        self._table.out.append(Send(flip.incarnation, SetRole(flip.to)))

    def _lose(self, flip: Flip, now: float) -> None:
        """It was told, and has not come back in time."""
        node = self._registry.called(flip.node)
        why = f"node {flip.node} did not take the role {flip.to.value} within {ORDER_PATIENCE:g} s"
        self._finish(flip, "lost", now, why)
        if node is not None:
            self._drop(node, Stalled(why), now)

    def _finish(self, flip: Flip, outcome: str, now: float, detail: str = "") -> None:
        del self.flips[flip.node]
        self._registry.switching.end(flip.node)
        probe = self._table.records.get(flip.probe) if flip.probe is not None else None
        if probe is not None:
            self._table.end(probe, Cancelled("the node is not to be probed any more"), now)
        if outcome == "lost":
            self._failures[flip.node] += 1
            rest = _FIRST_REST * 2.0 ** min(self._failures[flip.node] - 1, 10)
            self._rests[flip.node] = now + min(rest, _LONGEST_REST)
        report = flip.report(outcome, now, detail)
        self.over.append(report)
        self.counts[flip.to.value, outcome] += 1
        self._table.out.append(report)
        self._table.placeable = True
        self._stale = True

    # probes

    def _probe(self, flip: Flip) -> None:
        """Sent by the next step: here the node may not be in anybody's books yet."""
        flip.phase, flip.probe, flip.due = Phase.PROBING, None, None

    def _send_probe(self, flip: Flip, now: float) -> None:
        """A prompt of more than a block, salted so that no cache has it: it must be computed, and handed off if the
        mode has hand-offs. A new prefill node answers alone where no decode node has room: it is needed all the same,
        and there is nobody to hand off to."""
        model = self._registry.model
        assert model is not None, "a node has joined"
        smallest = min(node.info.context for node in self._registry.nodes.values())
        request = RequestId(f"probe-{flip.incarnation}-{flip.probes}")
        length = max(1, min(model.layout.block_size + 1, smallest - _OUTPUT_TOKENS))
        prompt = tuple(token % model.vocab_size for token in range(1, length + 1))
        alone = flip.to is Role.PREFILL and self._table.prospects.decode_full(blocks=_PROBE_BLOCKS)
        sampling = SamplingParams(1 if alone else _OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        flip.begin_probe(request)
        probe = Request(request, prompt, sampling, PROBE_TIMEOUT, cache_salt=request.encode(), standing=OURS)
        self._table.add_probe(probe, flip.incarnation, now)

    def _take_probed(self, now: float) -> None:
        probed, self._table.probed = self._table.probed, []
        for request, result in probed:
            flip = next((flip for flip in self.flips.values() if flip.probe == request), None)
            if flip is None:
                continue
            if isinstance(result, FinishReason):
                self._failures.pop(flip.node, None)
                self._finish(flip, "done", now)
            else:
                flip.rest(f"probe {flip.probes} failed: {result.message}", now)
