"""Prefill nodes that serve prompts with shared beginnings: the real policy, prefix directory, loads
and block pools, and nothing else. A node computes one prompt after another."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from baton.kv.blocks import HashChain, root_hash
from baton.types import AttemptKey, Incarnation, RequestId, Role
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.membership.node_registry import NodeMember
from coordinator.core.membership.prefix_directory import PrefixDirectory, PromptBlockHashes
from coordinator.core.placement.interface import PlacementContext, PlacementPolicy
from coordinator.core.placement.node_loads import NodeLoads, PlacementDemand
from node_engine.core.blocks.block_pool import BlockPool
from simulator.node_messages import SMALL_LAYOUT, make_join_info
from simulator.virtual_clock import VirtualClock

_BLOCK_SIZE = SMALL_LAYOUT.block_size
_ROOT_HASH = root_hash(b"m", SMALL_LAYOUT, b"")
_DIRECTORY_DELAY_SECONDS = 0.05  # from a change in a cache to its arrival in the directory


def prefill_cost_seconds(new_tokens: int) -> float:
    """Return what a prompt takes of which so many tokens are not cached."""
    return 0.002 + 50e-6 * new_tokens


@dataclass(eq=False)
class PrefillJob:
    number: int
    tokens: list[int]
    arrived: float
    block_hashes: PromptBlockHashes = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = PromptBlockHashes(HashChain(_ROOT_HASH, self.tokens, _BLOCK_SIZE))

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(RequestId(f"r{self.number}"), 1, 0)


class SimulatedPrefillNode:
    """A block pool, and the prompts that wait for their turn."""

    def __init__(self, name: str, num_blocks: int, now: float) -> None:
        info = make_join_info(
            name,
            Role.PREFILL,
            num_blocks=num_blocks,
            max_num_seqs=16,
            max_batched_tokens=512,
            max_model_len=1 << 16,
        )
        self.member = NodeMember(info, Incarnation(name), now, now, b"")
        self.pool = BlockPool(num_blocks, _BLOCK_SIZE, lambda: 0.0)
        self.waiting: deque[PrefillJob] = deque()
        self.running: PrefillJob | None = None
        self.busy_seconds = 0.0
        self.request_count = 0

    def compute_prompt(self, job: PrefillJob) -> tuple[int, int]:
        """Return (cached, new) tokens; the pool is then as after the prompt."""
        owner, chain = str(job.key), HashChain(_ROOT_HASH, job.tokens, _BLOCK_SIZE)
        match = self.pool.match_prefix(chain, len(job.tokens) - 1, owner, allow_partial=False)
        blocks = -(-len(job.tokens) // _BLOCK_SIZE)
        fresh = self.pool.allocate_blocks(blocks - len(match.blocks), owner)
        assert fresh is not None
        table = (*match.blocks, *fresh)
        for number in range(len(match.blocks), len(job.tokens) // _BLOCK_SIZE):
            self.pool.index_block(table[number], chain, number)
        self.pool.release_blocks(table, owner)
        return match.num_tokens, len(job.tokens) - match.num_tokens


class PrefillRoutingSimulation:
    """Places jobs on prefill nodes by `policy`, first come, first served."""

    def __init__(self, policy: PlacementPolicy, nodes: int, num_blocks: int) -> None:
        self.policy = policy
        self.costs, self.loads, self.directory = CostModel(), NodeLoads(), PrefixDirectory()
        self.nodes: dict[Incarnation, SimulatedPrefillNode] = {}
        self.queue: deque[PrefillJob] = deque()
        self.cached_tokens = self.prompt_tokens = self.done_count = 0
        self.waits: list[tuple[float, float]] = []  # (arrival, seconds until computed)
        self._clock = VirtualClock(self._place_jobs)
        for number in range(nodes):
            self.add_node(f"p{number}", num_blocks)

    def add_node(self, name: str, num_blocks: int) -> None:
        node = SimulatedPrefillNode(name, num_blocks, self._clock.now)
        incarnation = node.member.incarnation
        self.nodes[incarnation] = node
        self.loads.add_node(incarnation)
        self.directory.add_node(incarnation, num_blocks)
        self.directory.apply_snapshot(incarnation, 1, ())

    def kill_node(self, incarnation: Incarnation) -> None:
        """Lose a node; what it had is placed again."""
        node = self.nodes.pop(incarnation)
        self.loads.remove_node(incarnation)
        self.directory.remove_node(incarnation)
        lost = [node.running, *node.waiting] if node.running else list(node.waiting)
        self.queue.extendleft(reversed([job for job in lost if job is not None]))

    def kill_busiest_node(self) -> None:
        """Lose the node that has computed the most prompts."""
        busiest = max(self.nodes.values(), key=lambda node: node.request_count)
        self.kill_node(busiest.member.incarnation)

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        self._clock.call_at(when, call)

    def schedule_jobs(self, jobs: list[PrefillJob]) -> None:
        """Submit each job when it arrives."""
        for job in jobs:
            self.call_at(job.arrived, partial(self.queue.append, job))

    def run(self) -> None:
        """Run until nothing is left to do."""
        self._clock.run_events()

    def _place_jobs(self) -> None:
        now = self._clock.now
        while self.queue:
            job = self.queue[0]
            found = self.directory.match_prefix(job.block_hashes)
            demand = PlacementDemand(
                len(job.tokens),
                len(job.tokens) // _BLOCK_SIZE + 1,
                needs_prefill=True,
                needs_decode=False,
                cached_by_node={node: blocks * _BLOCK_SIZE for node, blocks in found.items()},
            )
            self.loads.rescale_recent_work(now)
            context = PlacementContext(now, self.costs, self.loads.work_unit(now))
            views = [self.loads.get_view(node.member) for node in self.nodes.values()]
            choice = self.policy.choose_nodes(demand, views, context)
            if choice is None or choice.prefill is None:
                return
            self.queue.popleft()
            self._give_job(job, self.nodes[choice.prefill], demand)

    def _give_job(
        self, job: PrefillJob, node: SimulatedPrefillNode, demand: PlacementDemand
    ) -> None:
        reusable = demand.cached_tokens_on(node.member.incarnation)
        costs = self.costs.get_node_costs(node.member.info.name)
        self.loads.add_leg(
            node.member.incarnation,
            job.key,
            demand.context_tokens,
            demand.blocks,
            seconds=costs.prefill_seconds(len(job.tokens) - reusable, reusable),
            now=self._clock.now,
        )
        node.waiting.append(job)
        self._start_job(node)

    def _start_job(self, node: SimulatedPrefillNode) -> None:
        if node.running is not None or not node.waiting:
            return
        job = node.running = node.waiting.popleft()
        cached, new = node.compute_prompt(job)
        seconds = prefill_cost_seconds(new)
        self.costs.record_prefill(node.member.info.name, new, cached, seconds)
        self.cached_tokens += cached
        self.prompt_tokens += len(job.tokens)
        node.busy_seconds += seconds
        node.request_count += 1
        self.call_at(self._clock.now + seconds, partial(self._finish_job, node))

    def _finish_job(self, node: SimulatedPrefillNode) -> None:
        incarnation, now = node.member.incarnation, self._clock.now
        if incarnation not in self.nodes:
            return  # killed in the meantime
        job, node.running = node.running, None
        assert job is not None
        self.done_count += 1
        self.waits.append((job.arrived, now - job.arrived))
        self.loads.acknowledge_leg(incarnation, job.key, computed=True, now=now)
        self.loads.remove_leg(incarnation, job.key)
        self.call_at(now + _DIRECTORY_DELAY_SECONDS, partial(self._publish_cache_events, node))
        self._start_job(node)

    def _publish_cache_events(self, node: SimulatedPrefillNode) -> None:
        incarnation, now = node.member.incarnation, self._clock.now
        if incarnation not in self.nodes:
            return  # killed in the meantime
        for change in node.pool.cache_journal.pop_events(now):
            # The link loses nothing here, so numbers go on from the last one.
            sequence = self.directory._caches[incarnation].last_sequence + 1
            self.directory.apply_events(
                incarnation, sequence, change.inserted_hashes, change.evicted_hashes, now
            )

    def imbalance(self) -> tuple[float, float]:
        """Return max / mean over the nodes, of requests and of busy seconds."""
        nodes = list(self.nodes.values())
        requests = [node.request_count for node in nodes]
        busy = [node.busy_seconds for node in nodes]
        return max(requests) / (sum(requests) / len(nodes)), max(busy) / (sum(busy) / len(nodes))


def draw_zipf_jobs(
    count: int, prefixes: int, per_second: float, *, seed: int = 1, exponent: float = 1.0
) -> list[PrefillJob]:
    """Draw Poisson arrivals; prompts of 32 shared blocks, Zipf-distributed, and 4 of their own."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / rank**exponent for rank in range(1, prefixes + 1)))
    shared = [[chance.randrange(1000) for _ in range(32 * _BLOCK_SIZE)] for _ in range(prefixes)]
    jobs, now = [], 0.0
    for number in range(count):
        now += chance.expovariate(per_second)
        (prefix,) = chance.choices(shared, cum_weights=weights)
        own = [chance.randrange(1000) for _ in range(4 * _BLOCK_SIZE)]
        jobs.append(PrefillJob(number, prefix + own, now))
    return jobs


def ideal_hit_rate(jobs: list[PrefillJob], num_blocks: int) -> float:
    """Return the hit rate of one cache that has all the memory."""
    node = SimulatedPrefillNode("ideal", num_blocks, 0.0)
    hits = sum(node.compute_prompt(job)[0] for job in jobs)
    return hits / sum(len(job.tokens) for job in jobs)
