"""Everything that the coordinator has learned about its nodes and their work, for placement.

`PlacementState` learns from reports. `CachedPrefixes` finds which nodes have cached the beginning
of a prompt, and pools of other hosts that have more of it. Such a pool is named in the order to the
node, so that the node's own pool can fetch the blocks instead of computing them. Both are hints:
the prefix directory may be stale.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.cluster_link.report_types import HandoffReport, NodeStats
from baton.kv.blocks import HashChain, root_hash, short_hash
from baton.prediction_error import MeanRelativeError
from baton.types import Incarnation, Request
from coordinator.core.estimates.cost_model import CostModel, DecodeStepStats, DecodeTimePredictor
from coordinator.core.estimates.workload import OutputLengthPredictor, WorkloadMeter
from coordinator.core.membership.node_registry import NodeMember, NodeRegistry
from coordinator.core.membership.prefix_directory import PoolMember, PoolRegistry, PrefixDirectory
from coordinator.core.placement.interface import LatencyPrediction

MIN_EXTRA_BLOCKS = 4  # below this the request to the pool costs more than it saves


def best_remote_pool(
    found: Mapping[Incarnation, int], pools: Iterable[PoolMember], host: str, here: int
) -> tuple[PoolMember, int] | None:
    """Return the pool of another host with the most blocks of a prompt, and how many.

    None unless it has MIN_EXTRA_BLOCKS more than `here`, the blocks on `host`. Of equal pools the
    one that joined first is chosen.
    """
    there = [
        (found.get(pool.incarnation, 0), -pool.joined_at, pool)
        for pool in pools
        if pool.info.host_id != host
    ]
    if not there:
        return None
    blocks, _, pool = max(there, key=lambda one: one[:2])
    return (pool, blocks) if blocks - here >= MIN_EXTRA_BLOCKS else None


class PromptBlockHashes:
    """The short hashes of a prompt's full blocks, computed on demand and at most once."""

    def __init__(self, chain: HashChain) -> None:
        self._hash_chain = chain
        self._hashes: list[int] = []

    @property
    def block_size(self) -> int:
        return self._hash_chain.block_size

    def __iter__(self) -> Iterator[int]:
        """Yield the short hashes of the full blocks, from the first one on."""
        for block in range(len(self._hash_chain.tokens) // self._hash_chain.block_size):
            if block == len(self._hashes):
                self._hashes.append(short_hash(self._hash_chain.block_hash(block)))
            yield self._hashes[block]


class CachedPrefixes:
    """Finds which nodes and pools seem to have the beginning of a prompt in their caches."""

    def __init__(
        self, registry: NodeRegistry, directory: PrefixDirectory, pools: PoolRegistry
    ) -> None:
        self._registry = registry
        self._directory = directory
        self._pools = pools

    def hash_prompt(self, request: Request) -> PromptBlockHashes:
        """Return the block hashes of the prompt. Valid only after the first join."""
        model = self._registry.model_identity
        assert model is not None, "no node has joined"
        root = root_hash(bytes.fromhex(model.model_digest), model.layout, request.cache_salt)
        return PromptBlockHashes(HashChain(root, request.prompt_token_ids, model.layout.block_size))

    def cached_tokens_by_node(self, block_hashes: PromptBlockHashes) -> dict[Incarnation, int]:
        """Return the prompt tokens that each node's cache, or its host's pool, seems to have."""
        held = self._reachable_blocks(self._directory.match_prefix(block_hashes))
        return {node: blocks * block_hashes.block_size for node, blocks in held.items()}

    def find_remote_prefixes(
        self, block_hashes: PromptBlockHashes, nodes: Iterable[Incarnation]
    ) -> dict[Incarnation, tuple[PoolMember, int]]:
        """For each of `nodes` whose host has a pool and less of the prompt than another host's
        pool: return that pool and how many tokens it seems to have."""
        pools, hosts = self._pools.members.values(), self._pools.hosts
        if len(hosts) < 2:
            return {}
        found = self._directory.match_prefix(block_hashes)
        held = self._reachable_blocks(found)
        remote: dict[Incarnation, tuple[PoolMember, int]] = {}
        for node in nodes:
            host = self._registry.nodes[node].info.host_id
            there = (
                best_remote_pool(found, pools, host, held.get(node, 0)) if host in hosts else None
            )
            if there is not None:
                remote[node] = (there[0], there[1] * block_hashes.block_size)
        return remote

    def _reachable_blocks(self, found: Mapping[Incarnation, int]) -> dict[Incarnation, int]:
        """Return the blocks that each node can reach: its own or its host's pool's."""
        held = dict(found)
        pooled: dict[str, int] = {}  # by host
        for pool in self._pools.members.values():
            blocks = held.pop(pool.incarnation, 0)
            if blocks:
                pooled[pool.info.host_id] = max(blocks, pooled.get(pool.info.host_id, 0))
        for node in self._registry.nodes.values() if pooled else ():
            blocks = pooled.get(node.info.host_id, 0)
            if blocks > held.get(node.incarnation, 0):
                held[node.incarnation] = blocks
        return held


class PlacementState:
    """The learned costs, output lengths and cached prefixes, and the reports they come from."""

    def __init__(self, registry: NodeRegistry) -> None:
        self.cost_model = CostModel()
        self.output_lengths = OutputLengthPredictor()
        self.decode_times = DecodeTimePredictor(self.output_lengths)
        self.prefix_directory = PrefixDirectory()
        self.pools = PoolRegistry(registry.silence_seconds)
        self.cached_prefixes = CachedPrefixes(registry, self.prefix_directory, self.pools)
        self.workload_meter = WorkloadMeter()
        self._registry = registry
        self._first_token_error = MeanRelativeError()

    @property
    def prediction_errors(self) -> dict[str, float]:
        """Mean relative errors of predictions, by what was predicted."""
        others = {
            "first_token": self._first_token_error,
            "output_tokens": self.output_lengths.relative_error,
        }
        return self.cost_model.relative_errors | {
            name: error.value for name, error in others.items() if error.count
        }

    def add_node(self, node: NodeMember) -> None:
        self.prefix_directory.add_node(node.incarnation, node.info.num_blocks)
        self.cost_model.node_count = len(self._registry.nodes)

    def remove_node(self, node: Incarnation) -> None:
        self.prefix_directory.remove_node(node)
        self.cost_model.node_count = len(self._registry.nodes)

    def expected_output_tokens(self, request: Request) -> float:
        """Return the predicted output length of the request."""
        return self.output_lengths.predict_tokens(
            request.principal.tenant, request.sampling.max_tokens
        )

    # outcomes of requests

    def record_answer(self, request: Request, tokens: int, seconds: float) -> None:
        """Learn from an output that was complete `seconds` after its first token."""
        self.decode_times.record_answer(tokens, seconds)
        self.output_lengths.record_output(
            request.principal.tenant, request.sampling.max_tokens, tokens
        )

    def record_first_token(self, prediction: LatencyPrediction, seconds: float) -> None:
        """Learn from a first token that came `seconds` after its placement."""
        self.decode_times.record_first_token_delay(seconds - prediction.prefill_seconds)
        self._first_token_error.add_prediction(prediction.ttft_seconds, seconds)

    # reports of nodes

    def record_decode_steps(
        self, node: NodeMember, before: NodeStats | None, after: NodeStats, now: float
    ) -> None:
        """Learn from the decode steps between two heartbeats, or before the first."""
        before = before or NodeStats()
        count = after.decode_steps - before.decode_steps
        if count <= 0:
            return
        seen = DecodeStepStats(
            step_seconds=(after.decode_step_seconds - before.decode_step_seconds) / count,
            batch_size=(after.decode_step_sequences - before.decode_step_sequences) / count,
            resident_tokens=(after.decode_step_tokens - before.decode_step_tokens) / count,
        )
        if seen.batch_size > 0 and seen.resident_tokens >= 0:
            self.cost_model.record_decode_steps(node.info.name, seen, now)

    def record_prefill(
        self, node: Incarnation | None, report: PrefillEnded | DecodeStarted, now: float
    ) -> None:
        """Learn from a prompt, or its uncached part, that a node computed."""
        new, cached = report.computed_tokens, report.cached_tokens
        found = self._registry.nodes.get(node) if node else None
        if new:  # else another node has computed it, and says so
            self.workload_meter.record_prefill(new, cached)
        if found is not None:
            self.cost_model.record_prefill(
                found.info.name, new, cached, report.compute_seconds, now
            )

    def record_handoff(
        self,
        writer: Incarnation | None,
        decode: Incarnation | None,
        report: HandoffReport,
        now: float,
    ) -> None:
        nodes = self._registry.nodes
        if writer in nodes and decode in nodes and report.bytes:
            seconds = report.exposed_seconds + report.commit_seconds
            names = nodes[writer].info.name, nodes[decode].info.name
            self.cost_model.record_transfer(*names, report.bytes, seconds, now)


class PlaceableRequest(Protocol):
    """What placement reads of a request; it sets the attributes that are not properties."""

    prompt_block_hashes: PromptBlockHashes | None  # None until placement was tried once
    cached_at_first_placement: int  # prompt tokens that some cache had at the first placement

    @property
    def request(self) -> Request: ...

    @property
    def deadline(self) -> float: ...

    @property
    def emitted_token_ids(self) -> list[int]: ...

    @property
    def remaining_tokens(self) -> int: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def max_total_tokens(self) -> int: ...

    @property
    def awaits_prompt_logprobs(self) -> bool: ...

    @property
    def prefix_holder(self) -> Incarnation | None: ...

    @property
    def probe_node(self) -> Incarnation | None: ...

    @property
    def avoided_nodes(self) -> frozenset[Incarnation]: ...
