"""What the coordinator has learned of its nodes and their work, and what follows from it for the next placement: one
object, so that the request table and the reports that feed it need to know one."""

from collections.abc import Iterable, Mapping

from baton.block_hash import root_hash
from baton.hash_chain import HashChain
from baton.mean_error import MeanError
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport
from baton.types import Incarnation, Request
from coordinator.core.answer_time import AnswerTimes
from coordinator.core.cost_model import CostModel, StepsSeen
from coordinator.core.elsewhere import richer_pool
from coordinator.core.messages import Admitted, CacheEvents, CacheSnapshot, PrefillEnded
from coordinator.core.names import PromptNames
from coordinator.core.output_length import OutputLengths
from coordinator.core.pools import PoolMember, Pools
from coordinator.core.prediction import Prediction
from coordinator.core.prefix_directory import PrefixDirectory
from coordinator.core.registry import Node, Registry
from coordinator.core.workload import WorkloadMeter


class Knowledge:
    def __init__(self, registry: Registry) -> None:
        self.costs = CostModel()
        self.lengths = OutputLengths()
        self.answers = AnswerTimes(self.lengths)
        self.directory = PrefixDirectory()
        self.pools = Pools(registry.silence)
        self.workload = WorkloadMeter()
        self._registry = registry
        self._first_token = MeanError()

    @property
    def errors(self) -> dict[str, float]:
        """Mean relative errors of predictions, by what was predicted."""
        others = {"first_token": self._first_token, "output_tokens": self.lengths.error}
        return self.costs.errors | {name: error.value for name, error in others.items() if error.count}

    def joined(self, node: Node) -> None:
        self.directory.join(node.incarnation, node.info.num_blocks)
        self.costs.members = len(self._registry.nodes)

    def left(self, node: Incarnation) -> None:
        self.directory.leave(node)
        self.costs.members = len(self._registry.nodes)

    # what is known of a prompt

    def names_of(self, request: Request) -> PromptNames:
        """Only after the first join."""
        model = self._registry.model
        assert model is not None, "no node has joined"
        root = root_hash(bytes.fromhex(model.model_digest), model.layout, request.cache_salt)
        return PromptNames(HashChain(root, request.prompt, model.layout.block_size))

    def held(self, names: PromptNames) -> dict[Incarnation, int]:
        """Tokens of the prompt that each node's cache, or the pool of its host, seems to have."""
        held = self._held(self.directory.match(names))
        return {node: blocks * names.block_size for node, blocks in held.items()}

    def elsewhere(self, names: PromptNames, nodes: Iterable[Incarnation]) -> dict[Incarnation, tuple[PoolMember, int]]:
        """For those of `nodes` that have a pool, and whose host has less of the prompt than another host's pool: that
        pool, and how many tokens it seems to have."""
        pools, hosts = self.pools.members.values(), self.pools.hosts
        if len(hosts) < 2:
            return {}
        found = self.directory.match(names)
        held, richer = self._held(found), {}
        for node in nodes:
            host = self._registry.nodes[node].info.host_id
            there = richer_pool(found, pools, host, held.get(node, 0)) if host in hosts else None
            if there is not None:
                richer[node] = (there[0], there[1] * names.block_size)
        return richer

    def _held(self, found: Mapping[Incarnation, int]) -> dict[Incarnation, int]:
        """Of `found`, in blocks, what each node can reach."""
        held, pooled = dict(found), dict[str, int]()  # the second by host
        for pool in self.pools.members.values():
            blocks = held.pop(pool.incarnation, 0)
            if blocks:
                pooled[pool.info.host_id] = max(blocks, pooled.get(pool.info.host_id, 0))
        for node in self._registry.nodes.values() if pooled else ():
            blocks = pooled.get(node.info.host_id, 0)
            if blocks > held.get(node.incarnation, 0):
                held[node.incarnation] = blocks
        return held

    def output_of(self, request: Request) -> float:
        """Tokens that its answer is expected to have."""
        return self.lengths.expect(request.standing.tenant, request.sampling.max_tokens)

    # what came of it

    def answered(self, request: Request, tokens: int, seconds: float) -> None:
        """It ended well, `seconds` after its first token."""
        self.answers.took(tokens, seconds)
        self.lengths.took(request.standing.tenant, request.sampling.max_tokens, tokens)

    def first_token(self, prediction: Prediction, seconds: float) -> None:
        """`seconds` after it was placed."""
        self.answers.began(seconds - prediction.prefill)
        self._first_token.add(prediction.first_token, seconds)

    # what nodes report

    def cache_events(self, node: Incarnation, message: CacheEvents, now: float) -> bool:
        """Whether the node is to be asked for a snapshot."""
        return self.directory.events(node, message.sequence, message.inserted, message.evicted, now)

    def cache_snapshot(self, node: Incarnation, message: CacheSnapshot) -> None:
        self.directory.snapshot(node, message.sequence, message.names)

    def steps(self, node: Node, before: NodeStats | None, after: NodeStats, now: float) -> None:
        """Between two heartbeats, or from the node's start to the first."""
        before = before or NodeStats()
        count = after.decode_steps - before.decode_steps
        if count <= 0:
            return
        seen = StepsSeen(
            seconds=(after.decode_step_seconds - before.decode_step_seconds) / count,
            sequences=(after.decode_step_sequences - before.decode_step_sequences) / count,
            resident=(after.decode_step_tokens - before.decode_step_tokens) / count,
        )
        if seen.sequences > 0 and seen.resident >= 0:
            self.costs.steps_took(node.info.name, seen, now)

    def computed(self, node: Incarnation | None, report: PrefillEnded | Admitted, now: float) -> None:
        """A prompt, or the part of one that was not cached."""
        new, cached = report.computed_tokens, report.cached_tokens
        found = self._registry.nodes.get(node) if node else None
        if new:  # else another node has computed it, and says so
            self.workload.prompt_done(new, cached)
        if found is not None:
            self.costs.prefill_took(found.info.name, new, cached, report.share_seconds, now)

    def handed_off(
        self, writer: Incarnation | None, decode: Incarnation | None, report: HandoffReport, now: float
    ) -> None:
        nodes = self._registry.nodes
        if writer in nodes and decode in nodes and report.bytes:
            seconds = report.exposed_seconds + report.commit_seconds
            names = nodes[writer].info.name, nodes[decode].info.name
            self.costs.transfer_took(*names, report.bytes, seconds, now)
