"""Prefill nodes on paper that serve prompts with shared beginnings: real policy, directory, books
and block pools, and nothing else. A node computes one prompt after another, as long as the true
cost says."""

import random
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count

from baton.kv.block_hash import HashChain, root_hash
from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.membership.node_registry import NodeMember
from coordinator.core.membership.prefix_directory import PrefixDirectory
from coordinator.core.placement.interface import PlacementContext, PlacementDemand, PlacementPolicy
from coordinator.core.placement.node_loads import NodeLoads
from coordinator.core.placement.placement_state import PromptBlockHashes
from node_engine.core.blocks.block_pool import BlockPool
from tests.unit.coordinator.core.brain_harness import LAYOUT, PREFILL, make_join_info

BLOCK = LAYOUT.block_size
ROOT = root_hash(b"m", LAYOUT, b"")
DIRECTORY_DELAY_SECONDS = 0.05  # seconds from a change in a cache to its arrival in the directory


def prefill_cost_seconds(new: int) -> float:
    return 0.002 + 50e-6 * new


@dataclass(eq=False)
class PrefillJob:
    number: int
    tokens: list[int]
    arrived: float
    block_hashes: PromptBlockHashes = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = PromptBlockHashes(HashChain(ROOT, self.tokens, BLOCK))

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(RequestId(f"r{self.number}"), 1, 0)


class SimulatedPrefillNode:
    def __init__(self, name: str, num_blocks: int, now: float) -> None:
        sizes = {
            "num_blocks": num_blocks,
            "max_num_seqs": 16,
            "max_batched_tokens": 512,
            "max_model_len": 1 << 16,
        }
        info = make_join_info(name, PREFILL, **sizes)
        self.node = NodeMember(info, Incarnation(name), now, now, b"")
        self.pool = BlockPool(num_blocks, BLOCK, lambda: 0.0)
        self.waiting: deque[PrefillJob] = deque()
        self.running: PrefillJob | None = None
        self.busy = 0.0
        self.requests = 0

    def compute_prompt(self, job: PrefillJob) -> tuple[int, int]:
        """(cached, new) tokens; the pool is then as after the prompt."""
        owner, chain = str(job.key), HashChain(ROOT, job.tokens, BLOCK)
        match = self.pool.match_prefix(chain, len(job.tokens) - 1, owner, allow_partial=False)
        fresh = self.pool.allocate_blocks(-(-len(job.tokens) // BLOCK) - len(match.blocks), owner)
        assert fresh is not None
        table = (*match.blocks, *fresh)
        for number in range(len(match.blocks), len(job.tokens) // BLOCK):
            self.pool.index_block(table[number], chain, number)
        self.pool.release_blocks(table, owner)
        return match.num_tokens, len(job.tokens) - match.num_tokens


class RoutingSimulation:
    def __init__(self, policy: PlacementPolicy, nodes: int, num_blocks: int) -> None:
        self.policy, self.now = policy, 0.0
        self.costs, self.loads, self.directory = CostModel(), NodeLoads(), PrefixDirectory()
        self.nodes: dict[Incarnation, SimulatedPrefillNode] = {}
        self.queue: deque[PrefillJob] = deque()
        self.cached = self.tokens = self.done = 0
        self.waits: list[tuple[float, float]] = []  # (arrival, seconds until computed)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = count()
        for number in range(nodes):
            self.add_node(f"p{number}", num_blocks)

    def add_node(self, name: str, num_blocks: int) -> None:
        paper = SimulatedPrefillNode(name, num_blocks, self.now)
        self.nodes[paper.node.incarnation] = paper
        self.loads.add_node(paper.node.incarnation)
        self.directory.add_node(paper.node.incarnation, num_blocks)
        self.directory.apply_snapshot(paper.node.incarnation, 1, ())

    def kill_node(self, name: Incarnation) -> None:
        """What it had is placed again."""
        paper = self.nodes.pop(name)
        self.loads.remove_node(name)
        self.directory.remove_node(name)
        lost = [paper.running, *paper.waiting] if paper.running else list(paper.waiting)
        self.queue.extendleft(reversed([job for job in lost if job is not None]))

    def schedule_event(self, when: float, what: str, subject: object) -> None:
        heappush(self._events, (when, next(self._order), what, subject))

    def run(self) -> None:
        while self._events:
            self.now, _, what, subject = heappop(self._events)
            if what == "arrive":
                assert isinstance(subject, PrefillJob)
                self.queue.append(subject)
            elif what == "kill hottest":
                self.kill_node(
                    max(self.nodes.values(), key=lambda each: each.requests).node.incarnation
                )
            elif (
                isinstance(subject, SimulatedPrefillNode) and subject.node.incarnation in self.nodes
            ):
                self._finish(subject) if what == "done" else self._publish_cache_events(subject)
            self._place()

    def _place(self) -> None:
        while self.queue:
            job = self.queue[0]
            found = self.directory.match_prefix(job.block_hashes)
            held = {node: blocks * BLOCK for node, blocks in found.items()}
            demand = PlacementDemand(
                len(job.tokens),
                len(job.tokens) // BLOCK + 1,
                needs_prefill=True,
                needs_decode=False,
                cached_by_node=held,
            )
            self.loads.rescale_recent_work(self.now)
            outlook = PlacementContext(self.now, self.costs, self.loads.work_unit(self.now))
            views = [self.loads.get_view(each.node) for each in self.nodes.values()]
            choice = self.policy.choose_nodes(demand, views, outlook)
            if choice is None or choice.prefill is None:
                return
            self.queue.popleft()
            paper, reusable = self.nodes[choice.prefill], demand.cached_tokens_on(choice.prefill)
            seconds = self.costs.get_node_costs(paper.node.info.name).prefill_seconds(
                len(job.tokens) - reusable, reusable
            )
            self.loads.add_leg(
                choice.prefill,
                job.key,
                demand.context_tokens,
                demand.blocks,
                seconds=seconds,
                now=self.now,
            )
            paper.waiting.append(job)
            self._start(paper)

    def _start(self, paper: SimulatedPrefillNode) -> None:
        if paper.running is not None or not paper.waiting:
            return
        job = paper.running = paper.waiting.popleft()
        cached, new = paper.compute_prompt(job)
        seconds = prefill_cost_seconds(new)
        self.costs.record_prefill(paper.node.info.name, new, cached, seconds)
        self.cached, self.tokens = self.cached + cached, self.tokens + len(job.tokens)
        paper.busy, paper.requests = paper.busy + seconds, paper.requests + 1
        self.schedule_event(self.now + seconds, "done", paper)

    def _finish(self, paper: SimulatedPrefillNode) -> None:
        job, paper.running = paper.running, None
        assert job is not None
        self.done += 1
        self.waits.append((job.arrived, self.now - job.arrived))
        self.loads.acknowledge_leg(paper.node.incarnation, job.key, computed=True, now=self.now)
        self.loads.remove_leg(paper.node.incarnation, job.key)
        self.schedule_event(self.now + DIRECTORY_DELAY_SECONDS, "tell", paper)
        self._start(paper)

    def _publish_cache_events(self, paper: SimulatedPrefillNode) -> None:
        for change in paper.pool.cache_journal.pop_events(self.now):
            sequence = (
                self.directory._caches[paper.node.incarnation].last_sequence + 1
            )  # the link loses nothing here
            self.directory.apply_events(
                paper.node.incarnation,
                sequence,
                change.inserted_hashes,
                change.evicted_hashes,
                self.now,
            )

    def imbalance(self) -> tuple[float, float]:
        """max / mean over the nodes, of requests and of busy seconds."""
        nodes = list(self.nodes.values())
        requests, busy = [each.requests for each in nodes], [each.busy for each in nodes]
        return max(requests) / (sum(requests) / len(nodes)), max(busy) / (sum(busy) / len(nodes))


def zipf_jobs(
    number: int, prefixes: int, per_second: float, *, seed: int = 1, exponent: float = 1.0
) -> list[PrefillJob]:
    """Poisson arrivals; prompts of 32 shared blocks, Zipf-distributed, and 4 of their own."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / rank**exponent for rank in range(1, prefixes + 1)))
    shared = [[chance.randrange(1000) for _ in range(32 * BLOCK)] for _ in range(prefixes)]
    jobs, now = [], 0.0
    for place in range(number):
        now += chance.expovariate(per_second)
        (prefix,) = chance.choices(shared, cum_weights=weights)
        jobs.append(
            PrefillJob(place, prefix + [chance.randrange(1000) for _ in range(4 * BLOCK)], now)
        )
    return jobs


def ideal_hit_rate(jobs: list[PrefillJob], num_blocks: int) -> float:
    """Of one cache that has all the memory."""
    one = SimulatedPrefillNode("ideal", num_blocks, 0.0)
    return sum(one.compute_prompt(job)[0] for job in jobs) / sum(len(job.tokens) for job in jobs)
