"""Four loads that need different ratios of eight nodes, and the settings of those nodes. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from baton.slo import Slo
from benchmarks.load.request_plan import LengthDistribution, PlannedRequest, poisson_times

NODE_COUNT = 8
SLO = Slo(ttft_seconds=3.0, tpot_seconds=0.07)
# So slow that two cores suffice for all eight nodes, and only the ratio is measured.
PACED_COSTS = MappingProxyType(
    {"paced_prefill_us_per_token": 2000.0, "paced_step_ms": 40.0, "paced_sequence_us": 2000.0}
)
SEQUENCES_PER_NODE = 16  # sequences of a node
_CYCLE, _BURST = 12.0, 3.0  # seconds; times the rate, for that part of a cycle


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Poisson arrivals, bursty or not."""

    requests_per_second: float
    prompt_lengths: LengthDistribution
    output_lengths: LengthDistribution
    is_bursty: bool = False

    def plan_requests(self, seed: str, seconds: float, begin: float = 0.0) -> list[PlannedRequest]:
        source = random.Random(seed)
        found: list[PlannedRequest] = []
        for at in poisson_times(self.requests_per_second, source):
            if at >= seconds:
                return found
            due = at // _CYCLE * _CYCLE + at % _CYCLE / _BURST if self.is_bursty else at
            prompt, output = self.prompt_lengths.sample(source), self.output_lengths.sample(source)
            found.append(PlannedRequest(begin + due, prompt, output, source.getrandbits(63)))
        raise AssertionError("arrivals have no end")


_LONG, _SHORT = (
    LengthDistribution("lognormal", 600, 0.5, 2048),
    LengthDistribution("lognormal", 100, 0.5, 2048),
)
_FEW, _MANY = LengthDistribution("uniform", 8, 24), LengthDistribution("uniform", 80, 160)
RATIO_WORKLOADS = {
    "prompt-heavy": OfferedLoad(3.5, _LONG, _FEW),
    "output-heavy": OfferedLoad(6.5, _SHORT, _MANY),
    "balanced": OfferedLoad(
        4.5, LengthDistribution("lognormal", 350, 0.5, 2048), LengthDistribution("uniform", 40, 80)
    ),
    "bursty": OfferedLoad(
        3.3,
        LengthDistribution("lognormal", 300, 0.8, 2048),
        LengthDistribution("uniform", 20, 120),
        is_bursty=True,
    ),
}
SWINGING_LOADS = (OfferedLoad(3.0, _LONG, _FEW), OfferedLoad(5.5, _SHORT, _MANY))


def plan_phases(loads: Sequence[tuple[OfferedLoad, float]], seed: str) -> list[PlannedRequest]:
    """Return one plan of several loads in succession, each for its seconds."""
    found: list[PlannedRequest] = []
    begin = 0.0
    for number, (load, seconds) in enumerate(loads):
        found += load.plan_requests(f"{seed}/{number}", seconds, begin)
        begin += seconds
    return found


def cluster_settings() -> dict[str, Any]:
    """Return the settings of the cluster, which starts with half of the nodes in each role."""
    half = NODE_COUNT // 2
    cluster = {
        "engine": "paced",
        "prefill": half,
        "decode": half,
        "max_num_seqs": SEQUENCES_PER_NODE,
        "kv_memory": "64MiB",
    }
    return {
        **cluster,
        **PACED_COSTS,
        "slo": str(SLO),
        "heartbeat": 0.5,
        "log_level": "warning",
        "flip_timeout": 10.0,
    }
