"""A cluster of paced processes under overload, and what is measured of it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.cluster import Cluster
from tests.open_loop import OpenLoop, OpenLoopOutcome, OpenLoopRequest, percentile
from tests.processes import measure_private_bytes
from tests.soak.conftest import Figures

JUDGED_SECONDS = 30.0  # seconds: from there on time is judged as well as outcomes
MAX_RECOVERY_SECONDS = 10.0  # seconds
MAX_REFUSAL_SECONDS = 0.05
MAX_TOKEN_GAP_SECONDS = 5.0
MIN_REQUESTS_PER_SECOND = (
    15.0  # requests a second that a short run takes for the capacity, however busy the machine
)
MAX_GROWTH_BYTES = 8 << 20  # bytes, over one run


@dataclass(slots=True)
class OverloadRun:
    """One cluster and what it can do: `requests_per_second` in requests a second;
    `idle_ttft_seconds` seconds to a first token of an idle one, `idle_latency_seconds` to the end.
    In a short run figures are only printed: on a busy machine they say nothing."""

    cluster: Cluster
    seconds: float
    figures: Figures
    requests_per_second: float = 0.0
    idle_ttft_seconds: float = 0.0
    idle_latency_seconds: float = 0.0
    _seed: int = 0

    @property
    def is_judged(self) -> bool:
        return self.seconds >= JUDGED_SECONDS

    def new_open_loop(self) -> OpenLoop:
        """Return clients whose prompts nobody has sent before."""
        self._seed += 1
        return OpenLoop(self.cluster.endpoints.http, self._seed)

    @property
    def reference_capacity(self) -> float:
        """The capacity, by which loads are measured."""
        return (
            self.requests_per_second
            if self.is_judged
            else max(self.requests_per_second, MIN_REQUESTS_PER_SECOND)
        )

    def record_figures(self, deed: str, **measured: str) -> None:
        self.figures += [(deed, name.replace("_", " "), value) for name, value in measured.items()]

    def check_figure(self, holds: bool, why: object) -> None:
        assert holds or not self.is_judged, why

    async def measure_capacity(self, ask: OpenLoopRequest, lanes: int) -> None:
        """Measure the latency of an idle cluster, and its throughput when it is saturated."""
        loop = self.new_open_loop()
        first = [await loop.run_client(ask) for _ in range(7)]
        self.idle_ttft_seconds = percentile([each.ttft_seconds for each in first], 0.5)
        self.idle_latency_seconds = percentile([each.ended_at - each.due_at for each in first], 0.5)
        self.requests_per_second = await loop.measure_throughput(
            ask, lanes, max(2.0, self.seconds / 3)
        )
        await self.cluster.wait_idle()
        self.record_figures(
            "capacity",
            requests_per_second=f"{self.requests_per_second:.1f}",
            idle_TTFT=format_ms(self.idle_ttft_seconds),
        )

    async def measure_recovery(self, loop: OpenLoop, ask: OpenLoopRequest, since: float) -> float:
        """Return the seconds until a new request is served as before; in a short run, until it
        is served."""
        while True:
            outcome = await loop.run_client(ask)
            if outcome.is_served and (
                outcome.ttft_seconds <= 3 * self.idle_ttft_seconds or not self.is_judged
            ):
                return max(0.0, outcome.due_at - since)
            assert time.monotonic() - since < 6 * MAX_RECOVERY_SECONDS, (
                f"it has not recovered: {outcome}"
            )
            await asyncio.sleep(0.1)

    def measure_memory(self) -> dict[str, int]:
        return measure_private_bytes(self.cluster.get_pids())

    def find_largest_growth(self, before: dict[str, int]) -> tuple[str, int]:
        """Return the process whose memory has grown most, and by how many bytes."""
        after = self.measure_memory()
        name = max(after, key=lambda each: after[each] - before[each])
        return name, after[name] - before[name]


def format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def format_percentiles(values: Sequence[float]) -> str:
    """Format seconds as milliseconds."""
    if not values:
        return "none"
    return (
        " / ".join(format_ms(percentile(list(values), share)) for share in (0.5, 0.95, 0.99))
        + " (p50 / p95 / p99)"
    )


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile; 0 without values."""
    return percentile(list(values), 0.99) if values else 0.0


def list_ttfts(outcomes: Sequence[OpenLoopOutcome], since: float = 0.0) -> list[float]:
    return [each.ttft_seconds for each in outcomes if each.is_served and each.due_at >= since]


def format_send_lag(outcomes: Sequence[OpenLoopOutcome]) -> str:
    """Return how much later than due requests were sent: the clients' own part of what is
    measured."""
    return format_percentiles([each.sent_at - each.due_at for each in outcomes])
