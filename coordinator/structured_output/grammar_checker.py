"""Checks the grammars of requests before they are admitted: each is compiled once by a worker.

Verdicts are kept by digest. A request whose grammar is known waits for nothing, and requests with
the same new grammar wait for one compilation. The worker process starts with the first grammar.

A new grammar gets a short time first, in which nearly all compile. Those that need more wait for
each other and not for short ones, so that grammars built to take long do not delay the others.
"""

import asyncio
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from baton.errors import InvalidRequest, Overloaded, ServiceUnavailable
from baton.process import log
from baton.types import StructuredOutput
from coordinator.structured_output.worker_protocol import (
    CompileJob,
    Verdict,
    encode_frame,
    split_frames,
)

MAX_PENDING_GRAMMARS = 64  # that are compiled or wait for it, without the slow ones
MAX_SLOW_GRAMMARS = 8  # that need more than QUICK_SECONDS
QUICK_SECONDS = 0.25  # in which a grammar is compiled at first
MAX_GRAMMAR_MEMORY_BYTES = 32 << 20  # that the compilation of one grammar may take
VERDICTS_PER_GRAMMAR = 64  # kept for each of --grammar-cache: a verdict is small
MAX_KEPT_BYTES = 16 << 20  # of the verdicts that are kept
_CONCURRENT_QUICK_JOBS = 2  # beside one slow job
_START_TIMEOUT_SECONDS = 60.0  # for the worker to import and read the tokenizer
_REPLY_GRACE_SECONDS = 30.0  # after which a worker that does not reply is killed: it may be starved
_WORKERS_PER_JOB = 2  # that are tried: a worker forks for each job, and seldom ends by one
_END_SECONDS = 5.0  # for a worker that has closed its output to end
_RETRY_SECONDS = 1.0  # after which a client may try again
_PARAM = "structured_output"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
_log = log.get_logger("grammar")


@dataclass(slots=True)
class GrammarCounts:
    """What was checked, for metrics."""

    cached: int = 0  # grammars whose verdict was known
    accepted: int = 0  # compiled, and served
    refused: int = 0  # compiled, and not served
    compile_seconds: float = 0.0


class GrammarChecker:
    """The grammars of one coordinator's requests. Event loop only."""

    def __init__(
        self, tokenizer_file: Path | None, *, timeout_seconds: float, max_entries: int
    ) -> None:
        """Without `tokenizer_file`, every grammar is refused."""
        self.counts = GrammarCounts()
        self._tokenizer_file = tokenizer_file
        self._timeout_seconds = timeout_seconds
        self._verdicts = _VerdictCache(max_entries, MAX_KEPT_BYTES)
        self._pending: dict[bytes, asyncio.Task[Verdict]] = {}
        self._quick_slots = asyncio.Semaphore(_CONCURRENT_QUICK_JOBS)
        self._slow_slot = asyncio.Semaphore(1)
        self._num_slow = 0
        self._worker: _WorkerClient | None = None
        self._job_ids = count(1)

    async def check_grammar(self, grammar: StructuredOutput) -> StructuredOutput:
        """Return the grammar as nodes compile it.

        Raises InvalidRequest for a grammar that cannot be served, Overloaded if too many wait, and
        ServiceUnavailable if the worker fails.
        """
        if self._tokenizer_file is None:
            raise InvalidRequest(
                f"{_PARAM} needs a tokenizer, and this model has no tokenizer.json", param=_PARAM
            )
        digest = grammar.digest
        verdict = self._verdicts.get_verdict(digest)
        if verdict is None:
            verdict = await asyncio.shield(self._start_job(digest, grammar))
        else:
            self.counts.cached += 1
        if verdict.error:
            raise InvalidRequest(f"{_PARAM}: {verdict.error}", param=_PARAM)
        return StructuredOutput(grammar.kind, verdict.text) if verdict.text else grammar

    async def close(self) -> None:
        """Kill the worker."""
        for job in tuple(self._pending.values()):
            job.cancel()
        if self._worker is not None:
            await self._worker.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the checks, for the registry of the coordinator."""
        counts = self.counts
        checked = CounterMetricFamily(
            "baton_grammars_total", "Grammars of requests, by what came of them", labels=["result"]
        )
        for result in ("cached", "accepted", "refused"):
            checked.add_metric([result], getattr(counts, result))
        yield checked
        yield CounterMetricFamily(
            "baton_grammar_check_seconds_total",
            "Seconds in which grammars were compiled before admission",
            value=counts.compile_seconds,
        )
        yield GaugeMetricFamily(
            "baton_grammars_pending",
            "Grammars that are compiled or wait for it before admission",
            value=len(self._pending),
        )

    def _start_job(self, digest: bytes, grammar: StructuredOutput) -> "asyncio.Task[Verdict]":
        if (pending := self._pending.get(digest)) is not None:
            return pending
        _check_room(len(self._pending) - self._num_slow, MAX_PENDING_GRAMMARS)
        job = self._pending[digest] = asyncio.create_task(self._run_job(digest, grammar))
        job.add_done_callback(lambda done: self._on_job_done(digest, done))
        return job

    def _on_job_done(self, digest: bytes, job: "asyncio.Task[Verdict]") -> None:
        del self._pending[digest]
        if not job.cancelled():
            job.exception()  # also retrieved if every request that waited is gone

    async def _run_job(self, digest: bytes, grammar: StructuredOutput) -> Verdict:
        quick_seconds = min(QUICK_SECONDS, self._timeout_seconds)
        verdict = await self._compile(grammar, quick_seconds, self._quick_slots)
        if verdict.is_late and quick_seconds < self._timeout_seconds:
            verdict = await self._compile_slowly(grammar)
        if verdict.is_starved:  # says nothing about the grammar, so it is not kept
            raise Overloaded(
                f"{verdict.error}, because the machine is busy", retry_after=_RETRY_SECONDS
            )
        if verdict.error:
            self.counts.refused += 1
        else:
            self.counts.accepted += 1
        self._verdicts.add_verdict(digest, verdict)
        return verdict

    async def _compile_slowly(self, grammar: StructuredOutput) -> Verdict:
        _check_room(self._num_slow, MAX_SLOW_GRAMMARS)
        self._num_slow += 1
        try:
            return await self._compile(grammar, self._timeout_seconds, self._slow_slot)
        finally:
            self._num_slow -= 1

    async def _compile(
        self, grammar: StructuredOutput, timeout_seconds: float, slots: asyncio.Semaphore
    ) -> Verdict:
        async with slots:
            job = CompileJob(
                next(self._job_ids),
                grammar.kind.value,
                grammar.text,
                timeout_seconds,
                MAX_GRAMMAR_MEMORY_BYTES,
            )
            verdict = await self._run_on_worker(job)
        self.counts.compile_seconds += verdict.seconds
        return verdict

    async def _run_on_worker(self, job: CompileJob) -> Verdict:
        for attempt in range(1, _WORKERS_PER_JOB + 1):
            worker = self._find_worker()
            try:
                return await worker.run_job(job, job.timeout_seconds + _REPLY_GRACE_SECONDS)
            except (TimeoutError, OSError, EOFError) as error:
                await worker.close()
                fields = log.get_error_fields(error)
                _log.error("grammar worker failed", attempt=attempt, code=worker.code, **fields)
                if isinstance(error, TimeoutError):
                    break
        raise ServiceUnavailable(
            "the process that compiles grammars has failed: try again",
            retry_after=_RETRY_SECONDS,
        )

    def _find_worker(self) -> "_WorkerClient":
        assert self._tokenizer_file is not None
        if self._worker is None or self._worker.is_closed:
            self._worker = _WorkerClient(self._tokenizer_file)
        return self._worker


def _check_room(count: int, limit: int) -> None:
    """Raises Overloaded if `count` grammars are waiting, and no more may."""
    if count >= limit:
        raise Overloaded(
            f"{count} grammars wait to be compiled: the limit is {limit}",
            retry_after=_RETRY_SECONDS,
        )


class _VerdictCache:
    """The last verdicts, bounded in number and in bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # the oldest use first

    def get_verdict(self, digest: bytes) -> Verdict | None:
        verdict = self._verdicts.get(digest)
        if verdict is not None:
            self._verdicts.move_to_end(digest)
        return verdict

    def add_verdict(self, digest: bytes, verdict: Verdict) -> None:
        self._verdicts[digest] = verdict
        self._num_bytes += _verdict_bytes(verdict)
        while len(self._verdicts) > self._max_entries or self._num_bytes > self._max_bytes:
            _, dropped = self._verdicts.popitem(last=False)
            self._num_bytes -= _verdict_bytes(dropped)


def _verdict_bytes(verdict: Verdict) -> int:
    return 256 + len(verdict.error) + len(verdict.text)


class _WorkerClient:
    """One worker process. Raises EOFError when it has ended."""

    def __init__(self, tokenizer_file: Path) -> None:
        self.is_closed = False
        self.code: int | None = None  # that the process ended with
        self._tokenizer_file = tokenizer_file
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.create_task(self._start())
        self._reading: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Verdict]] = {}

    async def run_job(self, job: CompileJob, timeout_seconds: float) -> Verdict:
        """Raises TimeoutError, OSError or EOFError if the worker fails."""
        error = await asyncio.wait_for(asyncio.shield(self._starting), _START_TIMEOUT_SECONDS)
        if error:
            return Verdict(job.id, error)
        assert self._process is not None
        assert self._process.stdin is not None
        reply = self._replies[job.id] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(encode_frame(job))
            await self._process.stdin.drain()
            return await asyncio.wait_for(reply, timeout_seconds)
        finally:
            del self._replies[job.id]

    async def close(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.is_closed = True
        self._starting.cancel()
        await asyncio.wait([self._starting])
        if self._process is not None and self._reading is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._reading

    async def _start(self) -> str:
        """Start the process. Returns why it cannot serve, or ""."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "coordinator.structured_output.compile_worker",
            str(self._tokenizer_file),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        ready: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._replies[0] = ready
        self._reading = asyncio.create_task(self._read_replies(self._process))
        try:
            return (await ready).error
        finally:
            del self._replies[0]

    async def _read_replies(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        buffer = bytearray()
        seconds = 0.0  # that the process has to end by itself
        try:
            while data := await process.stdout.read(1 << 16):
                buffer += data
                for body in split_frames(buffer):
                    verdict = msgspec.msgpack.decode(body, type=Verdict)
                    reply = self._replies.get(verdict.id)
                    if reply is not None and not reply.done():
                        reply.set_result(verdict)
            seconds = _END_SECONDS
        finally:
            self.is_closed = True
            self.code = await _end_process(process, seconds)
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(EOFError("the process has ended"))


async def _end_process(process: asyncio.subprocess.Process, seconds: float) -> int:
    """Wait until a process ends, and kill it after `seconds`. Returns its exit code."""
    try:
        return await asyncio.wait_for(process.wait(), seconds)
    except (TimeoutError, asyncio.CancelledError):
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
