"""Four loads that want different ratios of eight nodes, and the nodes that they are made for. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from baton.slo import Slo
from benchmarks.schedule import Lengths, Planned, arrivals

NODES = 8
SLO = Slo(ttft=3.0, tpot=0.07)
# So slow that two cores carry all eight nodes, and what is measured is the ratio.
COSTS = MappingProxyType({"paced_prefill_us_per_token": 2000.0, "paced_step_ms": 40.0, "paced_sequence_us": 2000.0})
SLOTS = 16  # sequences of a node
_CYCLE, _BURST = 12.0, 3.0  # seconds; times the rate, for that part of a cycle


@dataclass(frozen=True, slots=True)
class Offered:
    """Poisson arrivals of `rate` a second; with `bursts` all of a cycle of 12 s come within its first 4."""

    rate: float
    prompt: Lengths
    output: Lengths
    bursts: bool = False

    def plan(self, seed: str, seconds: float, begin: float = 0.0) -> list[Planned]:
        source = random.Random(seed)
        found: list[Planned] = []
        for at in arrivals(self.rate, source):
            if at >= seconds:
                return found
            due = at // _CYCLE * _CYCLE + at % _CYCLE / _BURST if self.bursts else at
            prompt, output = self.prompt.draw(source), self.output.draw(source)
            found.append(Planned(begin + due, prompt, output, source.getrandbits(63)))
        raise AssertionError("arrivals have no end")


_LONG, _SHORT = Lengths("lognormal", 600, 0.5, 2048), Lengths("lognormal", 100, 0.5, 2048)
_FEW, _MANY = Lengths("uniform", 8, 24), Lengths("uniform", 80, 160)
WORKLOADS = {
    "prompt-heavy": Offered(3.5, _LONG, _FEW),
    "output-heavy": Offered(6.5, _SHORT, _MANY),
    "balanced": Offered(4.5, Lengths("lognormal", 350, 0.5, 2048), Lengths("uniform", 40, 80)),
    "bursty": Offered(3.3, Lengths("lognormal", 300, 0.8, 2048), Lengths("uniform", 20, 120), bursts=True),
}
SWINGING = (Offered(3.0, _LONG, _FEW), Offered(5.5, _SHORT, _MANY))


def phases(loads: Sequence[tuple[Offered, float]], seed: str) -> list[Planned]:
    """One load after the other, each for so many seconds."""
    found: list[Planned] = []
    begin = 0.0
    for number, (load, seconds) in enumerate(loads):
        found += load.plan(f"{seed}/{number}", seconds, begin)
        begin += seconds
    return found


def settings() -> dict[str, Any]:
    """Of the cluster, which begins with half of the nodes in each role."""
    half = NODES // 2
    cluster = {"engine": "paced", "prefill": half, "decode": half, "max_num_seqs": SLOTS, "kv_memory": "64MiB"}
    return {**cluster, **COSTS, "slo": str(SLO), "heartbeat": 0.5, "log_level": "warning", "flip_timeout": 10.0}
