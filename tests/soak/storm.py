"""A cluster of paced processes under a storm, and what is measured of it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.cluster import Cluster
from tests.open_loop import Ask, OpenLoop, Outcome
from tests.processes import private_bytes
from tests.soak.conftest import Figures
from tests.virtual_cluster import percentile

JUDGED = 30.0  # seconds: from there on time is judged as well as outcomes
RECOVERY = 10.0  # seconds
REFUSAL = 0.05
SILENCE = 5.0
LEAST = 15.0  # requests a second that a short run takes for the capacity, however busy the machine
GROWTH = 8 << 20  # bytes, over one storm


@dataclass(slots=True)
class Storm:
    """One cluster and what it can do: `capacity` in requests a second; `idle` seconds to a first token of an idle one,
    `service` to the end. In a short run figures are only printed: on a busy machine they say nothing."""

    cluster: Cluster
    seconds: float
    figures: Figures
    capacity: float = 0.0
    idle: float = 0.0
    service: float = 0.0
    _seed: int = 0

    @property
    def judged(self) -> bool:
        return self.seconds >= JUDGED

    def loop(self) -> OpenLoop:
        """Each has prompts that nobody has sent before."""
        self._seed += 1
        return OpenLoop(self.cluster.where.http, self._seed)

    @property
    def scale(self) -> float:
        """The capacity, by which loads are measured."""
        return self.capacity if self.judged else max(self.capacity, LEAST)

    def note(self, deed: str, **measured: str) -> None:
        self.figures += [(deed, name.replace("_", " "), value) for name, value in measured.items()]

    def judge(self, holds: bool, why: object) -> None:
        assert holds or not self.judged, why

    async def measure(self, ask: Ask, lanes: int) -> None:
        """What it serves an idle client in, and how much it serves when more ask than it can take."""
        loop = self.loop()
        first = [await loop.ask(ask) for _ in range(7)]
        self.idle = percentile([each.ttft for each in first], 0.5)
        self.service = percentile([each.ended - each.due for each in first], 0.5)
        self.capacity = await loop.lanes(ask, lanes, max(2.0, self.seconds / 3))
        await self.cluster.wait_quiet()
        self.note("capacity", requests_per_second=f"{self.capacity:.1f}", idle_TTFT=ms(self.idle))

    async def recovery(self, loop: OpenLoop, ask: Ask, since: float) -> float:
        """Seconds until a newcomer was served as it had been before; in a short run, until it was served."""
        while True:
            outcome = await loop.ask(ask)
            if outcome.served and (outcome.ttft <= 3 * self.idle or not self.judged):
                return max(0.0, outcome.due - since)
            assert time.monotonic() - since < 6 * RECOVERY, f"it has not recovered: {outcome}"
            await asyncio.sleep(0.1)

    def memory(self) -> dict[str, int]:
        return private_bytes(self.cluster.pids())

    def grown(self, before: dict[str, int]) -> tuple[str, int]:
        """The process that has grown most, and by how many bytes."""
        after = self.memory()
        name = max(after, key=lambda each: after[each] - before[each])
        return name, after[name] - before[name]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def spread(values: Sequence[float]) -> str:
    """Seconds, as milliseconds."""
    if not values:
        return "none"
    return " / ".join(ms(percentile(list(values), share)) for share in (0.5, 0.95, 0.99)) + " (p50 / p95 / p99)"


def p99(values: Sequence[float]) -> float:
    """0 if there are none."""
    return percentile(list(values), 0.99) if values else 0.0


def ttfts(outcomes: Sequence[Outcome], since: float = 0.0) -> list[float]:
    return [each.ttft for each in outcomes if each.served and each.due >= since]


def lag(outcomes: Sequence[Outcome]) -> str:
    """How much later than they were due requests were sent: of what is measured, the clients' own part."""
    return spread([each.sent - each.due for each in outcomes])
