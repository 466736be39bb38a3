"""Prefill nodes on paper that serve prompts with shared beginnings: real policy, directory, books and block pools, and
nothing else. A node computes one prompt after another, as long as the true cost says."""

import random
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, count

from baton.block_hash import root_hash
from baton.hash_chain import HashChain
from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.cost_model import CostModel
from coordinator.core.loads import Loads
from coordinator.core.names import PromptNames
from coordinator.core.placement import Demand, Outlook, Placement
from coordinator.core.prefix_directory import PrefixDirectory
from coordinator.core.registry import Node
from node_engine.core.block_pool import BlockPool
from tests.unit.coordinator_core.world import LAYOUT, PREFILL, join_info

BLOCK = LAYOUT.block_size
ROOT = root_hash(b"m", LAYOUT, b"")
TELL = 0.05  # seconds from a change in a cache to its arrival in the directory


def true_cost(new: int) -> float:
    return 0.002 + 50e-6 * new


@dataclass(eq=False)
class Job:
    number: int
    tokens: list[int]
    arrived: float
    names: PromptNames = field(init=False)

    def __post_init__(self) -> None:
        self.names = PromptNames(HashChain(ROOT, self.tokens, BLOCK))

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(RequestId(f"r{self.number}"), 1, 0)


class PaperNode:
    def __init__(self, name: str, num_blocks: int, now: float) -> None:
        sizes = {"num_blocks": num_blocks, "max_num_seqs": 16, "max_batched_tokens": 512, "max_model_len": 1 << 16}
        info = join_info(name, PREFILL, **sizes)
        self.node = Node(info, Incarnation(name), now, now, b"")
        self.pool = BlockPool(num_blocks, BLOCK, lambda: 0.0)
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None
        self.busy = 0.0
        self.requests = 0

    def compute(self, job: Job) -> tuple[int, int]:
        """(cached, new) tokens; the pool is then as after the prompt."""
        owner, chain = str(job.key), HashChain(ROOT, job.tokens, BLOCK)
        match = self.pool.match_prefix(chain, len(job.tokens) - 1, owner, allow_partial=False)
        fresh = self.pool.allocate(-(-len(job.tokens) // BLOCK) - len(match.blocks), owner)
        assert fresh is not None
        table = (*match.blocks, *fresh)
        for number in range(len(match.blocks), len(job.tokens) // BLOCK):
            self.pool.seal_block(table[number], chain, number)
        self.pool.release(table, owner)
        return match.num_tokens, len(job.tokens) - match.num_tokens


class Simulation:
    def __init__(self, policy: Placement, nodes: int, num_blocks: int) -> None:
        self.policy, self.now = policy, 0.0
        self.costs, self.loads, self.directory = CostModel(), Loads(), PrefixDirectory()
        self.nodes: dict[Incarnation, PaperNode] = {}
        self.queue: deque[Job] = deque()
        self.cached = self.tokens = self.done = 0
        self.waits: list[tuple[float, float]] = []  # (arrival, seconds until computed)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = count()
        for number in range(nodes):
            self.add(f"p{number}", num_blocks)

    def add(self, name: str, num_blocks: int) -> None:
        paper = PaperNode(name, num_blocks, self.now)
        self.nodes[paper.node.incarnation] = paper
        self.loads.add_node(paper.node.incarnation)
        self.directory.join(paper.node.incarnation, num_blocks)
        self.directory.snapshot(paper.node.incarnation, 1, ())

    def kill(self, name: Incarnation) -> None:
        """What it had is placed again."""
        paper = self.nodes.pop(name)
        self.loads.remove_node(name)
        self.directory.leave(name)
        lost = [paper.running, *paper.waiting] if paper.running else list(paper.waiting)
        self.queue.extendleft(reversed([job for job in lost if job is not None]))

    def at(self, when: float, what: str, subject: object) -> None:
        heappush(self._events, (when, next(self._order), what, subject))

    def run(self) -> None:
        while self._events:
            self.now, _, what, subject = heappop(self._events)
            if what == "arrive":
                assert isinstance(subject, Job)
                self.queue.append(subject)
            elif what == "kill hottest":
                self.kill(max(self.nodes.values(), key=lambda each: each.requests).node.incarnation)
            elif isinstance(subject, PaperNode) and subject.node.incarnation in self.nodes:
                self._finish(subject) if what == "done" else self._tell(subject)
            self._place()

    def _place(self) -> None:
        while self.queue:
            job = self.queue[0]
            found = self.directory.match(job.names)
            held = {node: blocks * BLOCK for node, blocks in found.items()}
            demand = Demand(len(job.tokens), len(job.tokens) // BLOCK + 1, prefill=True, decode=False, held=held)
            self.loads.keep_scale(self.now)
            outlook = Outlook(self.now, self.costs, self.loads.unit(self.now))
            views = [self.loads.view(each.node) for each in self.nodes.values()]
            choice = self.policy.choose(demand, views, outlook)
            if choice is None or choice.prefill is None:
                return
            self.queue.popleft()
            paper, reusable = self.nodes[choice.prefill], demand.held_by(choice.prefill)
            seconds = self.costs.node(paper.node.info.name).prefill(len(job.tokens) - reusable, reusable)
            self.loads.place(choice.prefill, job.key, demand.tokens, demand.blocks, seconds=seconds, now=self.now)
            paper.waiting.append(job)
            self._start(paper)

    def _start(self, paper: PaperNode) -> None:
        if paper.running is not None or not paper.waiting:
            return
        job = paper.running = paper.waiting.popleft()
        cached, new = paper.compute(job)
        seconds = true_cost(new)
        self.costs.prefill_took(paper.node.info.name, new, cached, seconds)
        self.cached, self.tokens = self.cached + cached, self.tokens + len(job.tokens)
        paper.busy, paper.requests = paper.busy + seconds, paper.requests + 1
        self.at(self.now + seconds, "done", paper)

    def _finish(self, paper: PaperNode) -> None:
        job, paper.running = paper.running, None
        assert job is not None
        self.done += 1
        self.waits.append((job.arrived, self.now - job.arrived))
        self.loads.heard_of(paper.node.incarnation, job.key, computed=True, now=self.now)
        self.loads.end(paper.node.incarnation, job.key)
        self.at(self.now + TELL, "tell", paper)
        self._start(paper)

    def _tell(self, paper: PaperNode) -> None:
        for change in paper.pool.journal.take(self.now):
            sequence = self.directory._caches[paper.node.incarnation].last + 1  # the link loses nothing here
            self.directory.events(paper.node.incarnation, sequence, change.inserted, change.evicted, self.now)

    def imbalance(self) -> tuple[float, float]:
        """max / mean over the nodes, of requests and of busy seconds."""
        nodes = list(self.nodes.values())
        requests, busy = [each.requests for each in nodes], [each.busy for each in nodes]
        return max(requests) / (sum(requests) / len(nodes)), max(busy) / (sum(busy) / len(nodes))


def zipf_jobs(number: int, prefixes: int, per_second: float, *, seed: int = 1, exponent: float = 1.0) -> list[Job]:
    """Poisson arrivals; prompts of 32 shared blocks, Zipf-distributed, and 4 of their own."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / rank**exponent for rank in range(1, prefixes + 1)))
    shared = [[chance.randrange(1000) for _ in range(32 * BLOCK)] for _ in range(prefixes)]
    jobs, now = [], 0.0
    for place in range(number):
        now += chance.expovariate(per_second)
        (prefix,) = chance.choices(shared, cum_weights=weights)
        jobs.append(Job(place, prefix + [chance.randrange(1000) for _ in range(4 * BLOCK)], now))
    return jobs


def ideal_hit_rate(jobs: list[Job], num_blocks: int) -> float:
    """Of one cache that has all the memory."""
    one = PaperNode("ideal", num_blocks, 0.0)
    return sum(one.compute(job)[0] for job in jobs) / sum(len(job.tokens) for job in jobs)
