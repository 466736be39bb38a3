"""`routing`: what one placement costs the coordinator, by cluster size and directory size.

The real brain with the default policy runs in this process, with stubbed nodes. Half of the prompts
begin with blocks that some node has, up to `--depth` blocks. The figures are CPU time of this
thread, the median over `--decisions`:

    decision   hash the prompt as far as it is cached, look it up, score every node, choose
    auto       the same in mode auto, which predicts the latency of both prefill sites
    request    all that the brain does to admit a request, place it and end it
    event      a block that a node's cache gains or loses

 and how `decision` grows from a sixteenth of the directory to all of it, and from a sixteenth of
the nodes.
"""

import argparse
import random
import time
from collections.abc import Iterator
from statistics import median

from rich.console import Console

from baton.cluster_link.messages import (
    CacheEvents,
    CacheSnapshot,
    Heartbeat,
    JoinInfo,
)
from baton.cluster_link.report_types import NodeStats
from baton.config.settings import Config
from baton.errors import Cancelled
from baton.kv.blocks import BlockHash, KVLayout, iter_block_hashes, root_hash, short_hash
from baton.types import Incarnation, Request, RequestId, Role, SamplingParams
from benchmarks.figures.report import ResultRow, make_row, print_rows
from coordinator.core.brain import Brain
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import PrefixAwarePolicy
from coordinator.core.placement.request_placer import ServingMode
from simulator.node_messages import make_join_info

HELP = "what one placement costs, over many nodes and a large prefix directory"
DECISION_LIMIT = 1000.0  # maximum for a decision, in microseconds of CPU
_LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
_PROMPT = 2048  # tokens
_SHRINK_FACTOR = 16  # times
_DIGEST = "00" * 32
_NOW = 100.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=256, help="half of each role (default 256)")
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="in the directory (default 1000000)"
    )
    parser.add_argument(
        "--depth", type=int, default=64, help="blocks of a prompt that are held (default 64)"
    )
    parser.add_argument("--decisions", type=int, default=400, help="that are timed (default 400)")


class StubbedCluster:
    """A brain with stubbed nodes, and `blocks` in its prefix directory in all."""

    def __init__(
        self, nodes: int, blocks: int, depth: int, mode: ServingMode = "disaggregated"
    ) -> None:
        settings = BrainSettings(
            mode=mode,
            max_queue=1024,
            max_attempts=8,
            reserve_timeout=1e9,
            local_prefill_share=Config().local_prefill_share,
        )
        self.brain = Brain(NodeRegistry(1e9, 1e9), PrefixAwarePolicy(), settings)
        self.nodes = [Incarnation(f"{number:016x}") for number in range(nodes)]
        self._random = random.Random(0)
        self._serial = 0
        share = blocks // nodes
        for number, node in enumerate(self.nodes):
            self.brain.join_node(_join_info(number, share + 1), node, 0.0)
            self.brain.receive_report(
                node, Heartbeat(NodeStats(blocks_total=share + 1, blocks_free=share + 1)), _NOW
            )
        self.prompts = [
            tuple(self._random.randrange(32000) for _ in range(_PROMPT)) for _ in range(64)
        ]
        self._fill_directory(share, depth)

    def _fill_directory(self, share: int, depth: int) -> None:
        root = root_hash(bytes.fromhex(_DIGEST), _LAYOUT, b"")
        cached: list[list[int]] = [[] for _ in self.nodes]
        for prompt in self.prompts[::2]:
            hashes = [
                short_hash(block_hash)
                for block_hash in _take_first(
                    iter_block_hashes(root, prompt, _LAYOUT.block_size), depth
                )
            ]
            for place in self._random.sample(range(len(self.nodes)), min(8, len(self.nodes))):
                cached[place] += hashes
        for node, hashes in zip(self.nodes, cached, strict=True):
            others = (self._random.getrandbits(64) for _ in range(max(0, share - len(hashes))))
            self.brain.receive_report(node, CacheSnapshot(1, (*hashes[:share], *others)), _NOW)

    def make_request(self) -> Request:
        """Return a prompt that begins like a known one and then continues differently."""
        self._serial += 1
        known_prompt = self.prompts[self._serial % len(self.prompts)]
        suffix = tuple(self._random.randrange(32000) for _ in range(_LAYOUT.block_size))
        sampling = SamplingParams(128)
        return Request(
            RequestId(f"{self._serial:032x}"),
            known_prompt[: -len(suffix)] + suffix,
            sampling,
            600.0,
        )

    def time_decisions(self, count: int) -> list[float]:
        """Return microseconds of each decision; a request ends before the next one is placed."""
        placer = (
            self.brain.parts.placement.placer
        )  # time the decision itself, without the code around it
        decide = placer.decide_placement

        def timed(*arguments: object) -> object:
            began = time.thread_time_ns()
            decision = decide(*arguments)  # type: ignore[arg-type]
            took.append((time.thread_time_ns() - began) / 1e3)
            return decision

        took: list[float] = []
        placer.decide_placement = timed  # type: ignore[method-assign,assignment]
        self.time_requests(count)
        placer.decide_placement = decide  # type: ignore[method-assign]
        return took

    def time_requests(self, count: int) -> list[float]:
        """Return microseconds of each request from arrival to end."""
        took: list[float] = []
        for _ in range(count):
            request = self.make_request()
            began = time.thread_time_ns()
            self.brain.submit_request(request, _NOW)
            self.brain.cancel_request(request.id, Cancelled("measured"), _NOW)
            took.append((time.thread_time_ns() - began) / 1e3)
        return took

    def time_cache_events(self, count: int) -> list[float]:
        """Return microseconds per block, in messages that insert and evict 64 blocks each."""
        took: list[float] = []
        node, before = self.nodes[0], tuple[int, ...]()
        for sequence in range(2, 2 + count // 64):
            names = tuple(self._random.getrandbits(64) for _ in range(64))
            began = time.thread_time_ns()
            self.brain.receive_report(node, CacheEvents(sequence, names, before), _NOW)
            took.append((time.thread_time_ns() - began) / 1e3 / 128)
            before = names
        return took


def measure_routing(
    nodes: int, blocks: int, depth: int, decisions: int, command: str
) -> list[ResultRow]:
    full_cluster = StubbedCluster(nodes, blocks, depth)
    decision = median(full_cluster.time_decisions(decisions))
    rows = [
        make_row("routing/decision", decision, "us", command, DECISION_LIMIT),
        make_row("routing/request", median(full_cluster.time_requests(decisions)), "us", command),
        make_row(
            "routing/event", median(full_cluster.time_cache_events(64 * 64)), "us/block", command
        ),
    ]
    del full_cluster
    auto = median(StubbedCluster(nodes, blocks, depth, "auto").time_decisions(decisions))
    rows.insert(1, make_row("routing/auto", auto, "us", command, DECISION_LIMIT))
    fewer_blocks = StubbedCluster(
        nodes, blocks // _SHRINK_FACTOR, min(depth, blocks // _SHRINK_FACTOR // nodes)
    )
    rows.append(_growth_row("blocks", decision, fewer_blocks, decisions, command, limit=1.5))
    fewer_nodes = StubbedCluster(max(2, nodes // _SHRINK_FACTOR), blocks // _SHRINK_FACTOR, depth)
    rows.append(
        _growth_row("nodes", decision, fewer_nodes, decisions, command, limit=float(_SHRINK_FACTOR))
    )
    return rows


def _growth_row(
    what_grows: str,
    decision: float,
    smaller: StubbedCluster,
    decisions: int,
    command: str,
    limit: float,
) -> ResultRow:
    """Return how many times longer a decision takes for 16 times as much.

    For blocks the limit is above what a logarithm would allow.
    """
    return make_row(
        f"routing/growth_16x_{what_grows}",
        decision / median(smaller.time_decisions(decisions)),
        "times",
        command,
        limit,
    )


def _take_first(names: Iterator[BlockHash], count: int) -> Iterator[BlockHash]:
    return (name for name, _ in zip(names, range(count), strict=False))


def _join_info(number: int, num_blocks: int) -> JoinInfo:
    role = Role.PREFILL if number % 2 else Role.DECODE
    return make_join_info(
        f"{role.value}-{number}",
        role,
        model_digest=_DIGEST,
        layout=_LAYOUT,
        num_blocks=num_blocks,
        max_num_seqs=64,
        max_batched_tokens=8192,
        max_model_len=32768,
        vocab_size=32000,
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = measure_routing(options.nodes, options.blocks, options.depth, options.decisions, command)
    print_rows(console, f"routing: {options.nodes} nodes, {options.blocks:,} blocks", rows)
    return rows
