"""Grammars of requests are compiled by a worker process, within bounds, and once."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from baton.errors import BatonError, InvalidRequest, Overloaded, ServiceUnavailable
from baton.structured_output.grammar_compiler import load_grammar_tokenizer
from baton.types import GrammarKind, StructuredOutput
from coordinator.structured_output import compile_worker, grammar_checker
from coordinator.structured_output.compile_worker import GrammarCompileWorker, judge_end
from coordinator.structured_output.grammar_checker import GrammarChecker
from coordinator.structured_output.worker_protocol import CompileJob, Verdict, split_frames
from tests.small_tokenizers import byte_level_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
JSON, REGEX, GRAMMAR = GrammarKind.JSON, GrammarKind.REGEX, GrammarKind.GRAMMAR
TAG = GrammarKind.STRUCTURAL_TAG


def object_of(names: int, **schema: object) -> str:
    return json.dumps(
        {"type": "object", "properties": {f"p{number}": schema for number in range(names)}}
    )


def nested(depth: int) -> str:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return json.dumps(schema)


def chain(rules: int) -> str:
    lines = [f'r{number}: r{number + 1} | "a"' for number in range(rules)]
    return "\n".join(["start: r0", *lines, f'r{rules}: "b"'])


ACCEPTED = {
    "schema": (JSON, object_of(3, type="integer")),
    "anything": (JSON, "{}"),
    "many_properties": (JSON, object_of(200, type="string")),
    "repeats": (REGEX, "(a|b|ab){1,1000}c"),
    "states": (REGEX, "(a|b)*a(a|b){200}"),
    "long_string": (JSON, '{"type":"string","minLength":100000}'),
    "choice": (GrammarKind.CHOICE, '["a","b c","\\"\\\\é\\n/"]'),
    "many_choices": (GrammarKind.CHOICE, json.dumps([f"no {each}" for each in range(3000)])),
    "lark": (GRAMMAR, 'start: "a" start | "b"'),
    "tags": (
        TAG,
        '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f"]}',
    ),
}
REFUSED = {
    "not_a_schema": (JSON, "[1]", "the schema must be an object or a boolean"),
    "type": (JSON, '{"type":"strin"}', "Invalid type: strin"),
    "keyword": (JSON, '{"uniqueItems":true}', 'Unimplemented keys: ["uniqueItems"]'),
    "pointer": (JSON, '{"$ref":"#/$defs/x"}', "Pointer '/$defs/x' does not exist"),
    "remote": (JSON, '{"$ref":"http://127.0.0.1:9/x"}', "Default retriever does not fetch"),
    "contradiction": (JSON, '{"type":"integer","minimum":5,"maximum":1}', "Unsatisfiable schema"),
    "no_meaning": (JSON, '{"$ref":"#"}', "the schema has no end: each value of '#'"),
    "no_text": (REGEX, r"[^\s\S]", "no text satisfies the grammar"),
    "regex": (REGEX, "(a", "unclosed group"),
    "look_ahead": (REGEX, "(?=a)b", "look-around"),
    "rule": (GRAMMAR, "start: foo", 'unknown name: "foo"'),
    "gbnf": (GRAMMAR, "root ::= (", "the grammar is not GBNF"),
    "no_end": (GRAMMAR, 'start: "a" start', "Too many items"),
    "no_trigger": (
        TAG,
        '{"structures":[{"begin":"<f>","end":"</f>"}],"triggers":["<g"]}',
        "structures[0].begin starts with none of the triggers",
    ),
    "depth": (JSON, nested(200), "recursion limit exceeded"),
    "stack": (GRAMMAR, chain(3000), "the grammar is nested too deeply"),
    "endless": (
        JSON,
        '{"$ref":"#/$defs/x","$defs":{"x":{"type":"object","properties":{"x":{"$ref":"#/$defs/x"}},'
        '"required":["x"]}}}',
        "the schema has no end: each value of '#/$defs/x'",
    ),
    "memory": (JSON, '{"type":"integer","multipleOf":999983}', "needs more than 32 MiB"),
    "alternatives": (JSON, object_of(500, type="string"), "max is 2000"),
    "alternatives_off_the_lowest_path": (
        JSON,
        f'{{"type":"array","minItems":40,"items":{{"anyOf":[{{"type":"null"}},'
        f"{object_of(500, type='string')}]}}}}",
        "max is 2000",
    ),
}


def list_children() -> set[int]:
    """Pids of the processes that this one has started."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for children in tasks for pid in children.read_text().split()}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tokenizer.json"
    file.write_text(byte_level_tokenizer().to_str())
    return file


@asynccontextmanager
async def open_checker(
    file: Path | None, *, timeout_seconds: float = 60.0, max_entries: int = 1000
) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(file, timeout_seconds=timeout_seconds, max_entries=max_entries)
    try:
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker(tokenizer_file: Path) -> AsyncIterator[GrammarChecker]:
    async with open_checker(tokenizer_file) as made:
        yield made


@pytest.mark.parametrize("case", ACCEPTED)
async def test_grammars_that_can_be_served(checker: GrammarChecker, case: str) -> None:
    grammar = StructuredOutput(*ACCEPTED[case])
    assert await checker.check_grammar(grammar) == grammar


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_grammars_say_where_they_are_wrong(
    checker: GrammarChecker, case: str
) -> None:
    kind, text, reason = REFUSED[case]
    with pytest.raises(InvalidRequest) as refused:
        await checker.check_grammar(StructuredOutput(kind, text))
    assert refused.value.message.startswith("structured_output: ")
    assert reason in refused.value.message
    assert refused.value.param == "structured_output"


async def test_gbnf_reaches_nodes_as_lark(checker: GrammarChecker) -> None:
    checked = await checker.check_grammar(
        StructuredOutput(GRAMMAR, 'root ::= "a" root-two | "b"\nroot-two ::= [0-9]+')
    )
    assert "start:" in checked.text
    assert await checker.check_grammar(checked) == checked


async def test_a_known_grammar_is_not_compiled_again(checker: GrammarChecker) -> None:
    grammar, counts = StructuredOutput(REGEX, "known"), checker.counts
    before = counts.accepted, counts.cached
    await asyncio.gather(*(checker.check_grammar(grammar) for _ in range(5)))
    await checker.check_grammar(grammar)
    assert (counts.accepted, counts.cached) == (before[0] + 1, before[1] + 1)


async def test_a_grammar_that_takes_too_long_is_stopped(tokenizer_file: Path) -> None:
    async with open_checker(tokenizer_file, timeout_seconds=0.0001) as checker:
        with pytest.raises((InvalidRequest, Overloaded), match=r"took more than 0\.0001 s"):
            await checker.check_grammar(StructuredOutput(JSON, object_of(200, type="string")))


@pytest.mark.parametrize(
    ("status", "cpu_seconds", "error", "is_late", "is_starved"),
    [
        (signal.SIGKILL, 3.0, "took more than 5 s", True, False),
        (signal.SIGXCPU, 6.0, "took more than 5 s", True, False),
        (signal.SIGKILL, 1.0, "took more than 5 s", True, True),
        (signal.SIGSEGV, 1.0, "nested too deeply", False, False),
        (1 << 8, 1.0, "needs more than 32 MiB", False, False),
    ],
)
async def test_a_process_that_ends_without_a_verdict_has_a_reason(
    status: int, cpu_seconds: float, error: str, is_late: bool, is_starved: bool
) -> None:
    job = CompileJob(7, JSON.value, "{}", 5.0, 32 << 20)
    verdict = judge_end(job, status, 5.0, cpu_seconds)
    assert error in verdict.error
    assert (verdict.id, verdict.is_late, verdict.is_starved) == (7, is_late, is_starved)


async def test_a_process_that_has_replied_is_not_late(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker did not get the CPU until after the time of the job."""
    worker = GrammarCompileWorker(load_grammar_tokenizer(tokenizer_file))
    job = CompileJob(7, REGEX.value, "a", 60.0, 32 << 20)
    worker.start_job(job)
    (child,) = worker.children
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.deadline = 0.0
    verdicts: list[bytes] = []
    monkeypatch.setattr(compile_worker, "write_all", lambda _, data: verdicts.append(data))
    worker.end_late_jobs()
    (body,) = split_frames(bytearray(verdicts[0]))
    verdict = msgspec.msgpack.decode(body, type=Verdict)
    assert (verdict.id, verdict.error, verdict.is_late) == (7, "", False)


class FakeWorker:
    """Compiles texts of `slow` only once `release` is set; others at once. `starved` never."""

    def __init__(self) -> None:
        self.is_closed = False
        self.slow: set[str] = set()
        self.starved: set[str] = set()
        self.release = asyncio.Event()

    async def run_job(self, job: CompileJob, timeout_seconds: float) -> Verdict:
        if job.text in self.starved:
            return Verdict(job.id, "late", is_late=True, is_starved=True)
        if job.text in self.slow and job.timeout_seconds <= grammar_checker.QUICK_SECONDS:
            return Verdict(job.id, "late", is_late=True)
        if job.text in self.slow:
            await self.release.wait()
        return Verdict(job.id)

    async def close(self) -> None:
        pass


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    made = FakeWorker()
    monkeypatch.setattr(grammar_checker, "_WorkerClient", lambda file: made)
    return made


async def test_slow_grammars_do_not_delay_others(
    tokenizer_file: Path, fake_worker: FakeWorker
) -> None:
    async with open_checker(tokenizer_file, timeout_seconds=5.0) as checker:
        count = grammar_checker.MAX_SLOW_GRAMMARS
        fake_worker.slow = {f"slow{number}" for number in range(count + 1)}
        slow = [
            asyncio.create_task(checker.check_grammar(StructuredOutput(REGEX, text)))
            for text in sorted(fake_worker.slow)
        ]
        refused, waiting = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        (error,) = [each.exception() for each in refused]
        assert isinstance(error, Overloaded)
        for number in range(grammar_checker.MAX_PENDING_GRAMMARS):
            grammar = StructuredOutput(REGEX, f"quick{number}")
            assert await asyncio.wait_for(checker.check_grammar(grammar), 60) == grammar
        assert not any(each.done() for each in waiting)
        fake_worker.release.set()
        assert len(await asyncio.gather(*waiting)) == count


async def test_a_starved_grammar_may_be_tried_again(
    tokenizer_file: Path, fake_worker: FakeWorker
) -> None:
    async with open_checker(tokenizer_file, timeout_seconds=5.0) as checker:
        grammar = StructuredOutput(REGEX, "a")
        fake_worker.starved = {"a"}
        with pytest.raises(Overloaded, match="because the machine is busy"):
            await checker.check_grammar(grammar)
        fake_worker.starved = set()
        assert await checker.check_grammar(grammar) == grammar


async def test_the_number_of_pending_grammars_is_bounded(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_PENDING_GRAMMARS", 2)
    async with open_checker(tokenizer_file, max_entries=1) as checker:
        asked = [StructuredOutput(REGEX, text) for text in "aabc"]
        answers = await asyncio.gather(
            *(checker.check_grammar(one) for one in asked), return_exceptions=True
        )
        assert answers[:3] == asked[:3]
        assert isinstance(answers[3], Overloaded)
        assert checker.counts.accepted == 2
        await checker.check_grammar(asked[3])
        await checker.check_grammar(asked[0])  # dropped meanwhile
        assert checker.counts.accepted == 4


async def test_a_worker_that_is_killed_is_started_again(tokenizer_file: Path) -> None:
    async with open_checker(tokenizer_file) as checker:
        known = list_children()
        await checker.check_grammar(StructuredOutput(REGEX, "a"))
        (worker,) = list_children() - known
        os.kill(worker, signal.SIGKILL)
        asked = [StructuredOutput(REGEX, text) for text in "bc"]
        assert await asyncio.gather(*map(checker.check_grammar, asked)) == asked
        assert len(list_children() - known) == 1


async def test_workers_that_end_at_once_are_tried_twice(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = tmp_path / "python", tmp_path / "starts"
    program.write_text(f"#!/bin/sh\necho start >> {starts}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with capture_logs() as logs:
        async with open_checker(tokenizer_file) as checker:
            with pytest.raises(ServiceUnavailable, match="has failed: try again"):
                await checker.check_grammar(StructuredOutput(REGEX, "a"))
    assert starts.read_text() == "start\n" * 2
    failures = [
        (entry["attempt"], entry["code"]) for entry in logs if entry["log_level"] == "error"
    ]
    assert failures == [(1, 3), (2, 3)]


@pytest.mark.parametrize("text", ["{", '{"model":{"type":"Nothing"}}'])
async def test_a_tokenizer_that_cannot_be_read_refuses_every_grammar(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    async with open_checker(file) as checker:
        with pytest.raises(InvalidRequest, match="cannot be read for structured output"):
            await checker.check_grammar(StructuredOutput(REGEX, "a"))


async def test_a_model_without_a_tokenizer_refuses_every_grammar() -> None:
    async with open_checker(None) as checker:
        with pytest.raises(BatonError, match="this model has no tokenizer"):
            await checker.check_grammar(StructuredOutput(REGEX, "a"))
