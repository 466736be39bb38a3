"""Measures several servers in turn, cell by cell, and repeats cells that were disturbed."""

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from benchmarks.cpu.rates import MemoryReader
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.endpoint_model import fetch_model_name
from benchmarks.load.http_stream import HttpError, parse_url
from benchmarks.load.request_plan import ClosedLoop, PlannedRequest
from benchmarks.load.run_load import run_load
from benchmarks.peers.cells import CellFigures, CellMedians, PeerCell, evaluate_cell
from benchmarks.peers.processes import OtherProcessLoad, pause, resume
from benchmarks.peers.systems import PeerSystem, RunningSystem

_QUIET_SAMPLE_SECONDS = 1.0
_WARM_UP_REQUESTS = 2  # with the first lengths of the workload, at the beginning of a turn
_READ_PASSES = 3  # over memory, before and after a cell


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How cells are measured."""

    rounds: int
    max_foreign_cores: float  # that other processes may use in a cell
    attempts: int  # of a cell, while others disturb it
    quiet_seconds: float  # to wait at most for a quiet machine, before each cell
    cell_seconds: float  # of a cell at most
    request_seconds: float  # of a request at most
    vocabulary: int  # prompts use token ids below this
    seed: str


@dataclass(frozen=True, slots=True)
class MachineState:
    """CPU use by other processes during a cell, and memory bandwidth around it."""

    foreign_cores: float  # that other processes used
    # Of all cores, before and after the cell, in bytes per second. Empty if the server is on
    # another machine.
    read_bandwidths: Sequence[float]

    def __str__(self) -> str:
        others = f"others used {self.foreign_cores:.2f} cores"
        if not self.read_bandwidths:
            return others
        return f"{others}, memory {statistics.median(self.read_bandwidths) / 1e9:.0f} GB/s"


@dataclass
class PeerRounds:
    """Runs the rounds and collects their figures."""

    settings: RoundSettings
    cells: Sequence[PeerCell]
    console: Console
    memory: MemoryReader
    _figures: dict[tuple[str, PeerCell], dict[int, CellFigures]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _disturbed: dict[tuple[str, PeerCell], int] = field(default_factory=lambda: defaultdict(int))
    _missing: list[str] = field(default_factory=list)

    async def measure_all(self, systems: Sequence[PeerSystem]) -> None:
        """Give every system a turn in every cell of a round; another one begins each round.

        The turns of one cell follow each other, because the speed of memory may change within
        minutes. Raises ValueError if a server cannot be reached.
        """
        for number in range(self.settings.rounds):
            offset = number % len(systems)
            for cell in self.cells:
                for system in [*systems[offset:], *systems[:offset]]:
                    async with system.run_exclusively() as running:
                        await self._measure_turn(system.name, running, cell, number)

    def collect(self) -> dict[str, dict[PeerCell, CellMedians]]:
        """Return the medians of each system and cell that has figures."""
        found: dict[str, dict[PeerCell, CellMedians]] = defaultdict(dict)
        for (name, cell), figures in self._figures.items():
            found[name][cell] = CellMedians(dict(figures), self._disturbed[name, cell])
        return found

    def list_missing(self) -> list[str]:
        """Return the cells that have no figures in a round."""
        return self._missing

    async def _measure_turn(
        self, name: str, running: RunningSystem, cell: PeerCell, number: int
    ) -> None:
        client = await self._connect(name, running)
        workload = cell.workload
        for count in range(_WARM_UP_REQUESTS):
            salt = f"{self.settings.seed}/warm/{number}/{cell.name}/{name}"
            request = PlannedRequest(0.0, workload.prompt, workload.output, count, salt=salt)
            await client.measure_request(request, 0.0)
        await self._measure_cell(name, running, client, cell, number)

    async def _connect(self, name: str, running: RunningSystem) -> CompletionsClient:
        target = parse_url(running.url)
        settings = self.settings
        try:
            model = await fetch_model_name(target, "")
            client = CompletionsClient(
                target, model, "", settings.vocabulary, settings.request_seconds
            )
            return await client.probe_features()
        except (OSError, HttpError) as error:
            raise ValueError(f"{name} cannot be reached: {error}") from None

    async def _measure_cell(
        self,
        name: str,
        running: RunningSystem,
        client: CompletionsClient,
        cell: PeerCell,
        number: int,
    ) -> None:
        """Measure a cell until no other process disturbs it, or all attempts are used up."""
        settings = self.settings
        for attempt in range(settings.attempts):
            await self._wait_until_quiet(running)
            plan = cell.plan(f"{settings.seed}/{number}/{attempt}/{name}")
            load = ClosedLoop(cell.concurrency)
            bandwidths = self._measure_read_bandwidth(running)
            foreign = OtherProcessLoad(running.roots)
            measurements = await run_load(client, load, plan, settings.cell_seconds)
            cores = foreign.measure_cores()
            bandwidths += self._measure_read_bandwidth(running)
            figures = evaluate_cell(cell, measurements)
            is_disturbed = cores > settings.max_foreign_cores
            state = MachineState(cores, bandwidths)
            self._report(name, cell, number, figures, state, is_disturbed=is_disturbed)
            if not is_disturbed or attempt + 1 == settings.attempts:
                self._disturbed[name, cell] += is_disturbed
                if figures is None:
                    self._missing.append(f"{name} {cell.name}, round {number + 1}")
                else:
                    self._figures[name, cell][number] = figures
                return

    def _measure_read_bandwidth(self, running: RunningSystem) -> list[float]:
        """Measure with the server stopped, because threads of an idle server may spin."""
        if not running.roots:
            return []
        pause(running.roots)
        try:
            return [self.memory.measure_bandwidth() for _ in range(_READ_PASSES)]
        finally:
            resume(running.roots)

    async def _wait_until_quiet(self, running: RunningSystem) -> None:
        samples = int(self.settings.quiet_seconds / _QUIET_SAMPLE_SECONDS)
        for _ in range(samples):
            foreign = OtherProcessLoad(running.roots)
            await asyncio.sleep(_QUIET_SAMPLE_SECONDS)
            if foreign.measure_cores() <= self.settings.max_foreign_cores:
                return

    def _report(
        self,
        name: str,
        cell: PeerCell,
        number: int,
        figures: CellFigures | None,
        state: MachineState,
        *,
        is_disturbed: bool,
    ) -> None:
        rate = "no answers" if figures is None else f"{figures.tokens_per_second:.1f} tokens/s"
        mark = f"DISTURBED, {state}" if is_disturbed else str(state)
        self.console.print(f"round {number + 1}: {name} {cell.name}: {rate}; {mark}", markup=False)
