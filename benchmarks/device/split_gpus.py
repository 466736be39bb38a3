"""Two GPUs: prefill and decode apart, or both on each; and beside them vLLM on each.

    python -m benchmarks.device.split_gpus [--seconds 500] [--vllm PYTHON] [--parts interference]

`interference`: 8 and 32 streams decode, first alone and then while prompts of 8,192 tokens arrive
without a pause. One cluster has a prefill node on one GPU and a decode node on the other; another
one has a colocated node on each. Both run at the same time and are measured in turns. Two servers
of vLLM, which get half of the streams and of the prompts each, run after them, on one GPU each;
they differ by the largest number of tokens of a step (--vllm-chunks).

`goodput`: requests arrive as a Poisson process, the same ones at both clusters. What counts are
requests with a TTFT of at most 500 ms and a TPOT of at most 20 ms, per second.
"""

import argparse
import asyncio
import gc
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from baton.slo import Slo
from benchmarks.clusters.llama_folders import LLAMA_CONFIGS, write_llama_folder
from benchmarks.clusters.local_cluster import entered_together
from benchmarks.device.prefill_interference import (
    InterferenceFigures,
    InterferenceLoad,
    StreamLatencies,
    combine_windows,
    measure_streams,
)
from benchmarks.device.section_run import MeasuredModel
from benchmarks.device.served_systems import (
    MODEL_NAME,
    ServerSettings,
    find_vllm,
    start_baton,
    start_vllm,
)
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import parse_url
from benchmarks.load.measurement import CellResult, evaluate_cell
from benchmarks.load.request_plan import (
    LengthDistribution,
    PlannedRequest,
    PoissonArrivals,
    plan_requests,
)
from benchmarks.load.run_load import run_load
from node_engine.model.config.model_config import load_model_config

SPLIT, COLOCATED = "split", "colocated"
PARTS = ("interference", "goodput")
SLO = Slo(ttft_seconds=0.5, tpot_seconds=0.02)
_LONG_PROMPTS = 2  # in flight
GOODPUT_ROWS = "2048/128:4,8,12,16,20,24;512/256:8,16,32,48"
_VOCABULARY = 500  # prompts have token ids below this
_WINDOW_SECONDS = 30.0  # of one window at most
_WARM_UP_REQUESTS = 2
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GoodputRow:
    """Requests of the same lengths that arrive at one rate."""

    prompt_tokens: int
    output_tokens: int
    requests_per_second: float

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens} at {self.requests_per_second:g}/s"


def parse_goodput_rows(text: str) -> list[GoodputRow]:
    """Parse `2048/128:4,8;512/256:16`: prompt and output tokens, and requests per second.

    Raises ValueError.
    """
    rows = []
    for group in text.split(";"):
        try:
            lengths, _, rates = group.partition(":")
            prompt, output = map(int, lengths.split("/"))
            rows += [GoodputRow(prompt, output, float(rate)) for rate in rates.split(",")]
        except ValueError:
            raise ValueError(f"{group!r} is not PROMPT/OUTPUT:RATE,RATE") from None
    return rows


class SplitGpusRun:
    """One run of the benchmark: its results so far, and its deadline."""

    def __init__(self, options: argparse.Namespace, model: MeasuredModel) -> None:
        self.options = options
        self.ends_at: float = time.perf_counter() + options.seconds
        self.seed = secrets.token_hex(8)
        self.figures: dict[int, dict[str, InterferenceFigures]] = defaultdict(dict)
        self.goodput: dict[GoodputRow, dict[str, CellResult]] = defaultdict(dict)
        self._settings = ServerSettings(
            model=model,
            device=options.device,
            cache_bytes=options.kv_memory,
            max_model_len=options.max_model_len,
            max_num_seqs=128,
            overrides={},
        )
        self._loads = [
            InterferenceLoad(
                int(word),
                _LONG_PROMPTS,
                long_prompt_tokens=options.long_prompt,
                output_tokens=options.output,
            )
            for word in options.streams.split(",")
        ]

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.perf_counter()

    async def measure_all(self) -> None:
        gc.collect()
        gc.freeze()  # a collection of this process would look like a pause of all servers
        async with AsyncExitStack() as stack:
            clients = await self._start_clusters(stack)
            if "interference" in self.options.parts:
                await self._measure_interference(clients, 1)
            if "goodput" in self.options.parts:
                await self._measure_goodput(clients)
        if self.options.vllm and "interference" in self.options.parts:
            await self._measure_vllm()

    async def _start_clusters(self, stack: AsyncExitStack) -> dict[str, CompletionsClient]:
        console = Console(stderr=True)
        chunked = {"max_batched_tokens": self.options.colocated_chunk}
        split = start_baton(
            console, self._settings, prefill_nodes=1, start_timeout=self.seconds_left
        )
        colocated = start_baton(
            console,
            replace(self._settings, overrides=chunked),
            prefill_nodes=0,
            decode_nodes=2,
            start_timeout=self.seconds_left,
        )
        started = time.perf_counter()
        urls = await stack.enter_async_context(entered_together(split, colocated))
        _report(f"both clusters answer after {time.perf_counter() - started:.0f} s")
        return {
            name: await self._make_client(url)
            for name, url in zip((SPLIT, COLOCATED), urls, strict=True)
        }

    async def _make_client(self, url: str) -> CompletionsClient:
        client = CompletionsClient(parse_url(url), MODEL_NAME, "", _VOCABULARY, 60.0)
        client = await client.probe_features()
        load = self._loads[0]
        for prompt in (load.prompt_tokens, load.long_prompt_tokens):
            for number in range(_WARM_UP_REQUESTS):
                request = PlannedRequest(0.0, prompt, 8, number, salt=f"{self.seed}/warm/{url}")
                await client.measure_request(request, 0.0)
        return client

    async def _measure_interference(
        self, clients: dict[str, CompletionsClient], parts: int
    ) -> None:
        """Measure all clients; with several parts they share the load and run together."""
        for load in self._loads:
            shared = load.divide_by(parts)
            windows: dict[str, tuple[list[StreamLatencies], list[StreamLatencies]]]
            windows = {name: ([], []) for name in clients}
            for number in range(self.options.rounds):
                for busy in (False, True):
                    seed = f"{self.seed}/{load.concurrency}/{number}/{busy}"
                    calls = {
                        name: measure_streams(client, shared, seed, _WINDOW_SECONDS, busy=busy)
                        for name, client in clients.items()
                    }
                    if parts > 1:
                        found = await asyncio.gather(*calls.values())
                    else:
                        found = [await call for call in calls.values()]
                    for name, latencies in zip(calls, found, strict=True):
                        windows[name][busy].append(latencies)
                        _report(f"{name} c{load.concurrency} busy={busy}: {latencies}")
            for name, (idle, beside) in windows.items():
                self.figures[load.concurrency][name] = combine_windows(idle, beside)

    async def _measure_goodput(self, clients: dict[str, CompletionsClient]) -> None:
        for row in parse_goodput_rows(self.options.rows):
            for name, client in clients.items():
                if self.seconds_left < 2 * self.options.row_seconds:
                    _report(f"left out for want of time: {name}, {row}")
                    continue
                self.goodput[row][name] = result = await self._measure_row(row, name, client)
                _report(f"{name}, {row}: {result}")

    async def _measure_row(
        self, row: GoodputRow, name: str, client: CompletionsClient
    ) -> CellResult:
        load = PoissonArrivals(row.requests_per_second)
        plan = plan_requests(
            load,
            LengthDistribution("fixed", row.prompt_tokens),
            LengthDistribution("fixed", row.output_tokens),
            max(8, round(row.requests_per_second * self.options.row_seconds)),
            f"{self.seed}/{row}",
        )
        measured = await run_load(client, load, plan, 2 * self.options.row_seconds)
        return evaluate_cell(f"{name} {row}", measured, SLO)

    async def _measure_vllm(self) -> None:
        chunks = [int(word) for word in self.options.vllm_chunks.split(",")]
        memory = torch.cuda.get_device_properties(0).total_memory
        async with AsyncExitStack() as stack:
            started = time.perf_counter()
            servers = [
                start_vllm(
                    self.options.vllm,
                    self._settings,
                    memory,
                    self.seconds_left,
                    gpu=gpu,
                    chunk_tokens=chunk,
                )
                for gpu, chunk in enumerate(chunks)
            ]
            urls = await stack.enter_async_context(entered_together(*servers))
            _report(f"vLLM answers after {time.perf_counter() - started:.0f} s")
            clients = {
                f"vLLM, steps of {chunk}": await self._make_client(url)
                for chunk, url in zip(chunks, urls, strict=True)
            }
            await self._measure_interference(clients, len(chunks))

    # results

    def make_tables(self) -> list[Table]:
        return [self._make_interference_table(), self._make_goodput_table()]

    def _make_interference_table(self) -> Table:
        title = (
            f"Streams beside prompts of {self.options.long_prompt} tokens, ms; medians of rounds"
        )
        table = Table(
            *("streams", "system", "TPOT p99 idle", "beside", "ratio", "gap p99", "longest gap"),
            *("longest idle", "tokens/s", "prompts/s", "errors"),
            title=title,
            box=None,
        )
        for concurrency, systems in self.figures.items():
            for name, found in systems.items():
                idle, busy = found.idle, found.busy
                table.add_row(
                    *(str(concurrency), name),
                    *(f"{idle.tpot_p99 * 1e3:.2f}", f"{busy.tpot_p99 * 1e3:.2f}"),
                    *(f"{found.tpot_ratio:.2f}", f"{busy.gap_p99 * 1e3:.1f}"),
                    *(f"{busy.longest_gap * 1e3:.1f}", f"{idle.longest_gap * 1e3:.1f}"),
                    *(f"{busy.tokens_per_second:.0f}", f"{busy.long_prompts_per_second:.1f}"),
                    str(idle.errors + busy.errors),
                )
        return table

    def _make_goodput_table(self) -> Table:
        table = Table(
            "requests",
            *(SPLIT, COLOCATED, "split over colocated"),
            title=f"Good requests per second ({SLO}), their share; TTFT p50, TPOT p50 in ms",
            box=None,
        )
        for row, cells in self.goodput.items():
            ratio = "-"
            if len(cells) == 2 and cells[COLOCATED].goodput:
                ratio = f"{cells[SPLIT].goodput / cells[COLOCATED].goodput:.2f}"
            table.add_row(
                str(row), *(_format_cell(cells.get(name)) for name in (SPLIT, COLOCATED)), ratio
            )
        return table


def _format_cell(cell: CellResult | None) -> str:
    if cell is None or cell.ttft is None or cell.tpot is None:
        return "-"
    share = cell.good_count / cell.sent_count
    return f"{cell.goodput:.2f} ({share:.0%}) {cell.ttft.p50 * 1e3:.0f}, {cell.tpot.p50 * 1e3:.1f}"


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=500.0, help="of the whole run (500)")
    parser.add_argument("--rounds", type=int, default=3, help="of interference (3)")
    parser.add_argument("--streams", default="8,32", help="of interference (8,32)")
    parser.add_argument("--rows", default=GOODPUT_ROWS, help=f"of goodput ({GOODPUT_ROWS})")
    parser.add_argument("--row-seconds", type=float, default=10.0, help="of arrivals (10)")
    parser.add_argument("--colocated-chunk", type=int, default=512, help="tokens of a step (512)")
    parser.add_argument("--vllm", default=find_vllm(""), help="interpreter that has vLLM")
    parser.add_argument("--vllm-chunks", default="512,1024", help="of a step, one for each GPU")
    parser.add_argument("--kv-memory", type=int, default=12 * _GIB, help="bytes for each node")
    parser.add_argument("--max-model-len", type=int, default=8704)
    parser.add_argument("--long-prompt", type=int, default=8192, help="tokens (8192)")
    parser.add_argument("--output", type=int, default=256, help="tokens of a stream (256)")
    parser.add_argument("--model", choices=tuple(LLAMA_CONFIGS), default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_options()
    if unknown := set(options.parts.split(",")) - set(PARTS):
        raise SystemExit(f"--parts {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    with TemporaryDirectory(prefix="baton-bench-split-") as scratch:
        folder = write_llama_folder(Path(scratch, "model"), LLAMA_CONFIGS[options.model])
        run = SplitGpusRun(options, MeasuredModel(folder, load_model_config(folder), "dummy"))
        try:
            asyncio.run(run.measure_all())
        finally:
            console = Console(width=160)
            for table in run.make_tables():
                console.print(table)


if __name__ == "__main__":
    main()
