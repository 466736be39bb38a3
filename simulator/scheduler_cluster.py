"""The real brain and nodes with real schedulers: nothing computes, every step takes what the paced
engine's cost model says. Tokens are all the same; what is looked at is who is served when."""

import random
from functools import partial
from itertools import count

from baton.types import Incarnation, Request, RequestId, Role, SamplingParams
from coordinator.core.admission.tenants import TenantTable
from coordinator.core.common.settings import BrainSettings
from coordinator.core.placement.request_placer import ServingMode
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.step.step_batch import StepBatch
from node_engine.paced.costs import PacedCosts
from node_engine.paced.paced_engine import PACED_LAYOUT
from simulator.node_messages import make_join_info
from simulator.scheduler_node import SchedulerNode
from simulator.simulated_cluster import SimulatedCluster
from simulator.simulated_request import SimulatedRequest

_HEARTBEAT_SECONDS = 0.5
_TOKEN_IDS = range(1, 1000)


class SchedulerCluster(SimulatedCluster):
    """`nodes` decode nodes d0, d1, ..., and `prefill` prefill nodes after them."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        prefill: int = 0,
        mode: ServingMode = "colocated",
        prefill_share: float = 0.5,
        handoff_seconds: float = 0.002,
        tenants: TenantTable | None = None,
        blocks: int = 4096,
        max_num_seqs: int = 32,
        max_batched_tokens: int = 512,
        max_queue: int = 1024,
        costs: PacedCosts | None = None,
        seed: int = 0,
    ) -> None:
        """`blocks`, `max_num_seqs` and `max_batched_tokens` are those of each node."""
        settings = BrainSettings(
            mode=mode,
            max_queue=max_queue,
            max_attempts=8,
            reserve_timeout=15.0,
            local_prefill_share=prefill_share,
        )
        super().__init__(settings, _HEARTBEAT_SECONDS)
        self.random = random.Random(seed)
        # How many times as slow as the others a node is.
        self.slowdown_by_node: dict[str, float] = {}
        self.tenants = tenants or TenantTable()
        self._costs = costs or PacedCosts()
        self._handoff_seconds = handoff_seconds
        self._seed = seed
        self._requests = count()
        self._scheduler_nodes: list[SchedulerNode] = []
        if tenants is not None:
            self.brain.reload_tenants(tenants, 0.0)
        limits = SchedulerLimits(max_num_seqs, max_batched_tokens, max_model_len=1 << 16)
        for number in range(nodes + prefill):
            role = Role.DECODE if number < nodes else Role.PREFILL
            self._add_node(f"{role.value[0]}{number}", role, blocks, limits)

    def _add_node(self, name: str, role: Role, blocks: int, limits: SchedulerLimits) -> None:
        node = SchedulerNode(
            self,
            Incarnation(name),
            num_blocks=blocks,
            limits=limits,
            step_seconds=self._compute_step_seconds,
            handoff_seconds=self._handoff_seconds,
        )
        self._scheduler_nodes.append(node)
        info = make_join_info(
            name,
            role,
            layout=PACED_LAYOUT,
            num_blocks=blocks,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            max_model_len=limits.max_model_len,
        )
        self.join_node(node, info)

    def submit_prompt(
        self,
        tenant: str = "default",
        prompt_tokens: int = 64,
        output_tokens: int = 8,
        timeout_seconds: float = 600.0,
        priority: int = 0,
    ) -> SimulatedRequest:
        """A request with a random prompt arrives now."""
        known = self.tenants.get_tenant(tenant)
        request = Request(
            id=RequestId(f"r{next(self._requests)}"),
            prompt_token_ids=tuple(self.random.choices(_TOKEN_IDS, k=prompt_tokens)),
            sampling=SamplingParams(output_tokens),
            timeout_seconds=timeout_seconds,
            cache_salt=known.cache_salt,
            principal=self.tenants.make_principal(known, priority),
        )
        return self.submit_request(request)

    def schedule_poisson_load(
        self,
        rate: float,
        until: float,
        *,
        start: float = 0.0,
        tenant: str = "default",
        prompt_tokens: int = 64,
        output_tokens: int = 8,
        vary_outputs: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Submit `rate` requests a second; with `vary_outputs`, of uniform lengths around
        `output_tokens`."""
        draw = random.Random(f"{tenant} {self._seed}")
        when = start
        while (when := when + draw.expovariate(rate)) < until:
            tokens = output_tokens
            if vary_outputs:
                tokens = draw.randint(output_tokens // 4, 2 * output_tokens - output_tokens // 4)
            submit = partial(self.submit_prompt, tenant, prompt_tokens, tokens, timeout_seconds)
            self.call_at(when, submit)

    def total_device_seconds(self) -> dict[str, float]:
        """Return the device seconds of all nodes, by the names of their metrics."""
        total: dict[str, float] = {}
        for node in self._scheduler_nodes:
            for name, seconds in node.device_time.counters().items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def _compute_step_seconds(self, node: SchedulerNode, batch: StepBatch) -> float:
        slowdown = self.slowdown_by_node.get(node.incarnation, 1.0)
        return self._costs.compute_step_seconds(batch) * slowdown
