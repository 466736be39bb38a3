"""A process that compiles grammars to find out whether they can be served, with bounds.

The coordinator starts it with the path of the model's tokenizer.json, writes jobs to its standard
input and reads verdicts from its standard output. Each job runs in a fork of this process, which is
killed when its time is over and cannot take more memory than its share. So one grammar harms
neither the others nor the coordinator. This process has one thread, and ends when its standard
input does.
"""

import os
import random
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.errors import BatonError
from baton.structured_output.grammar_compiler import (
    compile_grammar,
    describe_matcher_error,
    load_grammar_tokenizer,
    to_lark,
)
from baton.types import GrammarKind, StructuredOutput
from coordinator.structured_output.endless_schemas import find_endless_reference
from coordinator.structured_output.error_location import locate_error
from coordinator.structured_output.worker_protocol import (
    CompileJob,
    Verdict,
    encode_frame,
    split_frames,
)

_NICENESS = 10  # grammars give way to the requests that are served
_STACK_BYTES = 1 << 20
_RANDOM_TRIALS = 3
_MAX_EQUAL_TOKENS = 64  # of a mask, up to which random tokens are equally likely
_TRIAL_TOKENS = 32  # after which a grammar that begins well is believed to go on well
_LOCATING_SECONDS = 0.1  # for finding the part of a schema that is wrong
_MIN_TRIAL_SECONDS = 0.0005  # that a part is assumed to take
_FAIR_CPU_SHARE = 0.5  # of the time of a job; one that is stopped with less was starved
_MAX_FORCED_TOKENS = 4096  # a grammar that leaves no choice for so long is said to have no end


def judge_grammar(tokenizer: LLTokenizer, grammar: StructuredOutput) -> tuple[str, str]:
    """Compile a grammar and try it. Returns the error or "", and the converted text or ""."""
    started = time.monotonic()
    try:
        converted = ""
        if grammar.kind is GrammarKind.GRAMMAR:
            lark = to_lark(grammar.text)
            converted = lark if lark != grammar.text else ""
            grammar = StructuredOutput(grammar.kind, lark)
        matcher = compile_grammar(tokenizer, grammar)
        return _find_endless(grammar) or _try_matcher(matcher), converted
    except BatonError as error:
        seconds = time.monotonic() - started
        place = _locate_error(tokenizer, grammar, error.message, seconds)
        return error.message.removeprefix("structured_output: ") + place, ""


def _locate_error(
    tokenizer: LLTokenizer, grammar: StructuredOutput, message: str, seconds: float
) -> str:
    """Return where in a schema the error is, or "". `seconds` is the time that it took so far."""
    if grammar.kind is not GrammarKind.JSON:
        return ""  # errors of other kinds have a place already

    def fails(part: Mapping[str, Any]) -> bool:
        text = msgspec.json.encode(part).decode()
        try:
            compile_grammar(tokenizer, StructuredOutput(GrammarKind.JSON, text))
        except BatonError as error:
            return error.message == message
        return False

    try:
        root = msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError):
        return ""
    if not isinstance(root, dict):
        return ""
    max_trials = int(_LOCATING_SECONDS / max(seconds, _MIN_TRIAL_SECONDS))
    pointer = locate_error(root, fails, max_trials)
    return f" (at #{pointer})" if pointer else ""


def _find_endless(grammar: StructuredOutput) -> str:
    """Return why the outputs of a schema never end, or ""."""
    if grammar.kind is not GrammarKind.JSON:
        return ""
    reference = find_endless_reference(msgspec.json.decode(grammar.text))
    if reference is None:
        return ""
    return f"the schema has no end: each value of {reference!r} needs another one in it"


def _try_matcher(matcher: LLMatcher) -> str:
    """Follow the grammar for some tokens. Returns why it cannot be followed, or "".

    The first path takes the tokens with the lowest ids, the others take random ones.
    """
    error = _follow_path(matcher.deep_copy(), _lowest_token)
    for seed in range(_RANDOM_TRIALS):
        draw = random.Random(seed)
        error = error or _follow_path(matcher.deep_copy(), partial(_random_token, draw))
    return error


def _lowest_token(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _random_token(draw: random.Random, mask: int) -> int:
    """Return one of the tokens of a mask, each as likely as the others if they are few."""
    if mask.bit_count() > _MAX_EQUAL_TOKENS:
        skipped = draw.randrange(mask.bit_length())
        return skipped + _lowest_token(mask >> skipped)
    for _ in range(draw.randrange(mask.bit_count())):
        mask &= mask - 1
    return _lowest_token(mask)


def _follow_path(matcher: LLMatcher, choose_token: Callable[[int], int]) -> str:
    """Follow one path; `choose_token` chooses from a mask of tokens."""
    chosen = forced = 0
    while chosen < _TRIAL_TOKENS and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            break
        if not mask:
            return "no text satisfies the grammar"
        has_choice = bool(mask & (mask - 1))
        chosen, forced = chosen + has_choice, 0 if has_choice else forced + 1
        if forced > _MAX_FORCED_TOKENS:
            return f"the grammar has no end within {forced - 1} tokens, none of which is a choice"
        matcher.consume_token(choose_token(mask))
    return describe_matcher_error(matcher) if matcher.is_error() else ""


@dataclass(slots=True)
class Child:
    """A process that runs one job. Times are of the monotonic clock, in seconds."""

    job: CompileJob
    pid: int
    started: float
    deadline: float
    reply: bytearray  # what was read of it so far


class GrammarCompileWorker:
    """Runs jobs in forks of this process, as many at once as there are."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}  # by the file descriptor of their reply

    def run(self) -> None:
        """Serve until standard input ends."""
        self._selector.register(0, selectors.EVENT_READ)
        buffer = bytearray()
        while True:
            due = min((child.deadline for child in self._children.values()), default=None)
            timeout = None if due is None else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(timeout):
                read = os.read(key.fd, 1 << 16)
                if key.fd != 0:
                    self._on_reply(key.fd, read)
                elif read:
                    buffer += read
                    for body in split_frames(buffer):
                        self.start_job(msgspec.msgpack.decode(body, type=CompileJob))
                else:
                    return
            self.end_late_jobs()

    def close(self) -> None:
        for child in self._children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    @property
    def children(self) -> tuple["Child", ...]:
        """The processes that run jobs."""
        return tuple(self._children.values())

    def start_job(self, job: CompileJob) -> None:
        """Fork a process for a job."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_job(self._tokenizer, job, writer)
        os.close(writer)
        now = time.monotonic()
        self._children[reader] = Child(job, pid, now, now + job.timeout_seconds, bytearray())
        self._selector.register(reader, selectors.EVENT_READ)

    def _on_reply(self, reader: int, read: bytes) -> None:
        child = self._children[reader]
        child.reply += read
        if not read:
            self._end_job(reader)

    def end_late_jobs(self) -> None:
        """Kill the processes whose time is over."""
        now = time.monotonic()
        for reader, child in tuple(self._children.items()):
            if now >= child.deadline:
                os.kill(child.pid, signal.SIGKILL)
                self._end_job(reader)

    def _end_job(self, reader: int) -> None:
        """Write the verdict of a child that has ended: its own, or why it has none."""
        child = self._children.pop(reader)
        self._selector.unregister(reader)
        _, status, usage = os.wait4(child.pid, 0)
        # It may have replied and ended by itself after the last read, just before it was killed.
        while data := os.read(reader, 1 << 16):
            child.reply += data
        os.close(reader)
        seconds = time.monotonic() - child.started
        verdict = judge_end(child.job, status, seconds, usage.ru_utime + usage.ru_stime)
        for body in split_frames(child.reply):
            own = msgspec.msgpack.decode(body, type=Verdict)
            verdict = Verdict(own.id, own.error, own.text, seconds)
        write_all(1, encode_frame(verdict))


def judge_end(job: CompileJob, status: int, seconds: float, cpu_seconds: float) -> Verdict:
    """Return the verdict of a job whose process ended with `status` before it had one."""
    by_signal: dict[int, str] = {
        signal.SIGKILL: f"the grammar took more than {job.timeout_seconds:g} s to compile",
        signal.SIGXCPU: f"the grammar took more than {job.timeout_seconds:g} s to compile",
        signal.SIGSEGV: "the grammar is nested too deeply",
    }
    memory = f"the grammar needs more than {job.memory_bytes >> 20} MiB to compile"
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    is_late = ended_by in (signal.SIGKILL, signal.SIGXCPU)
    return Verdict(
        job.id,
        by_signal.get(ended_by, memory),
        seconds=seconds,
        is_late=is_late,
        is_starved=is_late and cpu_seconds < _FAIR_CPU_SHARE * job.timeout_seconds,
    )


def _run_job(tokenizer: LLTokenizer, job: CompileJob, writer: int) -> None:
    """In a fork: do the job within its limits, reply, and exit."""
    code = 1
    try:
        limit = _address_space_bytes() + job.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        # Threads of nodes have twice as much: what compiles here does not overflow theirs.
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        seconds = int(job.timeout_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        grammar = StructuredOutput(GrammarKind(job.kind), job.text)
        error, text = judge_grammar(tokenizer, grammar)
        write_all(writer, encode_frame(Verdict(job.id, error, text)))
        code = 0
    finally:
        os._exit(code)


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    try:
        tokenizer = load_grammar_tokenizer(Path(sys.argv[1]))
    except BatonError as error:
        write_all(1, encode_frame(Verdict(0, error.message)))
        return
    write_all(1, encode_frame(Verdict(0)))
    os.nice(_NICENESS)
    worker = GrammarCompileWorker(tokenizer)
    try:
        worker.run()
    finally:
        worker.close()


if __name__ == "__main__":
    main()
