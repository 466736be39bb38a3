"""Section `served`: latency and throughput through the whole server, and beside vLLM.

Every system gets the same requests, row by row in turn if all fit on the device at once, and
otherwise one system after the other. All prompts are new, so that no cache of prefixes helps.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace

import torch

from baton.cli.common.errors import innermost_error
from baton.errors import NodeFailed
from baton.slo import Slo
from benchmarks.device import served_systems as systems
from benchmarks.device.section_run import SectionRun, TimeIsUp
from benchmarks.device.served_rows import (
    RowFigures,
    ServedRow,
    choose_cache_bytes,
    combine_rounds,
    describe_errors,
    fit_together,
    make_served_table,
)
from benchmarks.device.served_systems import COLOCATED, ONE_PREFILL_ONE_DECODE, VLLM
from benchmarks.device.step_bounds import ServedBound, bound_served_row
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import parse_url
from benchmarks.load.measurement import CellResult, evaluate_cell
from benchmarks.load.request_plan import (
    ClosedLoop,
    LengthDistribution,
    PlannedRequest,
    plan_requests,
)
from benchmarks.load.run_load import run_load

_WARM_UP_REQUESTS = 2  # of each length, before the first row
_ROW_SECONDS = 40.0  # at most
_ROUND_RESERVE = 1.2  # times the last round's seconds have to be left for another one
_VOCABULARY = 500  # prompts have token ids below this
_SLO = Slo(None, None)


@dataclass(frozen=True, slots=True)
class ServedCases:
    """What is served, and by which systems."""

    rows: Sequence[ServedRow]
    has_1p1d: bool
    vllm_python: str  # empty: no vLLM
    rounds: int  # of all rows, as long as there is time
    settings: systems.ServerSettings


@dataclass
class _ServedSection:
    run: SectionRun
    cases: ServedCases
    seed: str
    results: dict[str, dict[ServedRow, list[CellResult]]] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)

    async def measure_all(self) -> None:
        names = [COLOCATED]
        names += [ONE_PREFILL_ONE_DECODE] if self.cases.has_1p1d else []
        names += [VLLM] if self.cases.vllm_python else []
        self.results |= {name: defaultdict(list) for name in names}
        groups = [names] if self._fit_together(names) else [[name] for name in names]
        for group in groups:
            async with AsyncExitStack() as stack:
                clients = {
                    name: client
                    for name in group
                    if (client := await self._connect(name, stack)) is not None
                }
                await self._measure_rounds(clients, is_last=group is groups[-1])
        if ours := [name for name in self.not_started if name != VLLM]:
            raise NodeFailed(f"not started: {', '.join(ours)}")

    async def _measure_rounds(
        self, clients: Mapping[str, CompletionsClient], *, is_last: bool
    ) -> None:
        """Measure all rows, and again while there is time for a whole round more."""
        for number in range(self.cases.rounds if is_last else 1):
            started = time.perf_counter()
            for row in self.cases.rows:
                for name, client in clients.items():
                    self.run.require_time()
                    await self._measure_row(name, client, row, number)
            if self.run.seconds_left < _ROUND_RESERVE * (time.perf_counter() - started):
                return

    def _fit_together(self, names: Sequence[str]) -> bool:
        if self.run.device.type == "cpu":
            return True
        free, _ = torch.cuda.mem_get_info(self.run.device)
        largest = max(self.cases.settings.device_bytes(name) for name in names)
        return fit_together(len(names), largest, free)

    async def _connect(self, name: str, stack: AsyncExitStack) -> CompletionsClient | None:
        """Start a system and warm it up; None, with a note, if that is not possible."""
        self.run.require_time()
        started = time.perf_counter()
        try:
            url = await stack.enter_async_context(self._start(name))
        except Exception as error:
            self.run.leave_out(f"{name} does not start: {innermost_error(error)}")
            self.not_started.append(name)
            return None
        seconds = time.perf_counter() - started
        self.run.add_row(f"{name}/start", seconds, "s", note="until it answers, load included")
        client = CompletionsClient(
            parse_url(url), systems.MODEL_NAME, "", _VOCABULARY, timeout_seconds=60.0
        )
        client = await client.probe_features()
        for prompt, output in dict.fromkeys(
            (row.prompt_tokens, row.output_tokens) for row in self.cases.rows
        ):
            for number in range(_WARM_UP_REQUESTS):
                request = PlannedRequest(0.0, prompt, output, number, salt=f"{self.seed}/warm")
                await client.measure_request(request, 0.0)
        return client

    def _start(self, name: str) -> AbstractAsyncContextManager[str]:
        run, settings, left = self.run, self.cases.settings, self.run.seconds_left
        if name == VLLM:
            _, total = torch.cuda.mem_get_info(run.device)
            return systems.start_vllm(self.cases.vllm_python, settings, total, left)
        prefill_nodes = int(name == ONE_PREFILL_ONE_DECODE)
        return systems.start_baton(
            run.console, settings, prefill_nodes=prefill_nodes, start_timeout=left
        )

    async def _measure_row(
        self, name: str, client: CompletionsClient, row: ServedRow, number: int
    ) -> None:
        if row.is_sampled:
            client = replace(client, temperature=1.0, top_p=0.9)
        load = ClosedLoop(row.concurrency)
        lengths = (
            LengthDistribution("fixed", row.prompt_tokens),
            LengthDistribution("fixed", row.output_tokens),
        )
        seed = f"{self.seed}/{row.name}/{number}"
        plan = plan_requests(load, *lengths, row.num_requests, seed)
        seconds = min(_ROW_SECONDS, self.run.seconds_left)
        measurements = await run_load(client, load, plan, seconds)
        result = evaluate_cell(row.name, measurements, _SLO)
        self.results[name][row].append(result)
        rate = f"{result.tokens_per_second:,.0f} tokens/s"
        self.run.report_progress(f"{name}/{row.name}, round {number + 1}: {rate}")

    def conclude(self) -> None:
        """Add the figures of what was measured, and print the table."""
        figures: dict[str, dict[ServedRow, RowFigures]] = {name: {} for name in self.results}
        for name, rows in self.results.items():
            for row, results in rows.items():
                found = combine_rounds(results)
                if found is None:
                    errors = describe_errors(results)
                    self.run.leave_out(f"{name}/{row.name} has no answer: {errors}")
                    continue
                figures[name][row] = found
                add_figures(self.run, f"{name}/{row.name}", found, row, self._bound(row))
        for name, cells in figures.items():
            add_ratios(self.run, name, cells, figures.get(VLLM, {}))
        bounds = {
            row: bound.tokens_per_second
            for row in self.cases.rows
            if (bound := self._bound(row)) is not None
        }
        self.run.console.print(make_served_table(figures, bounds))

    def _bound(self, row: ServedRow) -> ServedBound | None:
        run = self.run
        if run.rates is None:
            return None
        lengths = row.prompt_tokens, row.output_tokens
        return bound_served_row(run.model.bounds, run.rates, *lengths, row.concurrency)


def make_cases(
    run: SectionRun,
    rows: Sequence[ServedRow],
    *,
    has_1p1d: bool,
    vllm_python: str,
    rounds: int,
    overrides: Mapping[str, object],
) -> ServedCases:
    """The same sizes for all systems: those that the rows need."""
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    settings = systems.ServerSettings(
        model=run.model,
        device=run.device.type,
        cache_bytes=choose_cache_bytes(rows, run.model.bounds),
        max_model_len=min(2 * longest, run.model.config.max_position_embeddings),
        max_num_seqs=max(64, *(row.concurrency for row in rows)),
        overrides=overrides,
    )
    return ServedCases(rows, has_1p1d, vllm_python, rounds, settings)


def measure(run: SectionRun, cases: ServedCases) -> None:
    """Start the systems, measure all rows, and add the figures of what there is."""
    section = _ServedSection(run, cases, secrets.token_hex(8))
    try:
        asyncio.run(_measure_within(section, run.seconds_left))
    finally:
        section.conclude()


async def _measure_within(section: _ServedSection, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await section.measure_all()
    except TimeoutError:
        raise TimeIsUp from None


def add_figures(
    run: SectionRun, prefix: str, figures: RowFigures, row: ServedRow, bound: ServedBound | None
) -> None:
    """Add the figures of a row. The bound of TTFT is that of a prompt that does not wait."""
    ttft_bound = bound.ttft if bound is not None and row.concurrency == 1 else None
    for name, seconds, least in (
        ("ttft", figures.ttft, ttft_bound),
        ("tpot", figures.tpot, bound.tpot if bound else None),
        ("longest_gap", figures.longest_gap, None),
    ):
        if least is None:
            run.add_row(f"{prefix}/{name}", seconds * 1e3, "ms", note=figures.note)
        else:
            run.add_time(f"{prefix}/{name}", seconds, least, figures.note)
    limit = bound.tokens_per_second if bound else None
    run.add_row(f"{prefix}/tokens", figures.tokens_per_second, "tokens/s", limit, figures.note)


def add_ratios(
    run: SectionRun,
    name: str,
    cells: Mapping[ServedRow, RowFigures],
    vllm: Mapping[ServedRow, RowFigures],
) -> None:
    """Add throughput with sampling over greedy, and the figures of a system over those of vLLM."""
    for row, figures in cells.items():
        prefix, rate = f"{name}/{row.name}", figures.tokens_per_second
        greedy = cells.get(replace(row, is_sampled=False))
        if row.is_sampled and greedy is not None:
            run.add_row(f"{prefix}/tokens_of_greedy", rate / greedy.tokens_per_second, "x")
        other = vllm.get(row)
        if name != VLLM and other is not None:
            run.add_row(f"{prefix}/tokens_of_vllm", rate / other.tokens_per_second, "x")
            run.add_row(f"{prefix}/ttft_of_vllm", figures.ttft / other.ttft, "x")
