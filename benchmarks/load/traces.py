"""Replaying a recorded workload: when requests came, how long they were, and which prefixes they
shared. No text.

Two public formats:

- Mooncake's JSON lines: `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
  "hash_ids": [...]}`, one id
  for each 512-token block of the prompt; equal ids are equal blocks. (Qin et al., FAST 2025.)
- Azure's CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. Nothing is known of what its prompts
  share: nothing here.
  (Patel et al., ISCA 2024.)
"""

import csv
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import msgspec

from benchmarks.load.request_plan import BlockPrompt, PlannedRequest

MOONCAKE_BLOCK = 512  # tokens
MAX_REQUESTS = 1_000_000
_MAX_LINE_CHARACTERS = 1 << 20  # characters
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """Requests come when the trace says, `speed` times as fast."""

    name: str
    speed: float = 1.0

    def __str__(self) -> str:
        return f"{self.name[:16]}@{self.speed:g}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace: seconds on the trace's own clock, lengths in tokens, ids of its
    512-token blocks."""

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, limit: int = 0) -> list[TraceRequest]:
    """The first `limit` requests of a trace (0: all), in order of time. Its first line tells the
    format. Raises ValueError naming file and line."""
    most = min(limit or MAX_REQUESTS, MAX_REQUESTS)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(_MAX_LINE_CHARACTERS)
            file.seek(0)
            parse = _parse_mooncake if first.lstrip().startswith("{") else _parse_azure
            found = list(islice(parse(_bounded_lines(file.readline), str(path)), most))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"trace {path} is not UTF-8 text") from None
    if not found:
        raise ValueError(f"trace {path} holds no requests")
    return sorted(found, key=lambda one: one.arrival_seconds)


def plan_from_trace(
    trace: list[TraceRequest], seed: str, speed: float = 1.0, scale: float = 1.0
) -> list[PlannedRequest]:
    """What to send: `speed` compresses time, `scale` every length, blocks included. Raises
    ValueError for a scale that leaves a block no room for its id."""
    if speed <= 0 or scale <= 0:
        raise ValueError(f"--speed {speed:g} and --scale-lengths {scale:g} must be above 0")
    block = max(1, round(MOONCAKE_BLOCK * scale))
    most = max((max(one.block_ids, default=0) for one in trace), default=0)
    return [
        PlannedRequest(
            start_seconds=(one.arrival_seconds - trace[0].arrival_seconds) / speed,
            prompt_tokens=_scaled_prompt(one, scale, block),
            output_tokens=max(1, round(one.output_tokens * scale)),
            seed=number,
            block_prompt=BlockPrompt(seed, one.block_ids, block, most) if one.block_ids else None,
            salt=seed,
        )
        for number, one in enumerate(trace)
    ]


def repeated_prefix_share(plan: Sequence[PlannedRequest]) -> float:
    """Share of prompt tokens in leading blocks that an earlier request had too: the most that a
    prefix cache saves."""
    seen: set[int] = set()
    repeated = 0
    for request in plan:
        shared = request.block_prompt
        if shared is not None:
            known = len(list(takewhile(seen.__contains__, shared.block_ids)))
            repeated += min(known * shared.block_tokens, request.prompt_tokens)
            seen.update(shared.block_ids)
    return repeated / sum(request.prompt_tokens for request in plan)


def _scaled_prompt(one: TraceRequest, scale: float, block: int) -> int:
    """At least one token in the last block, and no more than it has."""
    if not one.block_ids:
        return max(1, round(one.prompt_tokens * scale))
    before = (len(one.block_ids) - 1) * block
    return before + min(max(round(one.prompt_tokens * scale) - before, 1), block)


def _parse_mooncake(lines: Iterator[str], name: str) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = decode(line)
            _require(
                said.timestamp >= 0 and said.input_length >= 1 and said.output_length >= 0,
                "a value below 0",
            )
            wanted = -(-said.input_length // MOONCAKE_BLOCK)
            _require(len(said.hash_ids) == wanted, f"{len(said.hash_ids)} hash_ids, not {wanted}")
            _require(min(said.hash_ids) >= 0, "a hash id below 0")
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        yield TraceRequest(
            said.timestamp / 1e3,
            said.input_length,
            max(1, said.output_length),
            tuple(said.hash_ids),
        )


def _parse_azure(lines: Iterator[str], name: str) -> Iterator[TraceRequest]:
    rows = csv.reader(lines)
    header = tuple(next(rows, []))
    if header != _AZURE_COLUMNS:
        raise ValueError(
            f"{name} is no trace: it begins neither with an object nor with {','.join(_AZURE_COLUMNS)}"
        )
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            when, prompt, output = row
            at = datetime.datetime.fromisoformat(when).timestamp()
            _require(int(prompt) >= 1 and int(output) >= 0, "a length below 1")
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        yield TraceRequest(at, int(prompt), max(1, int(output)))


def _bounded_lines(readline: Callable[[int], str]) -> Iterator[str]:
    while line := readline(_MAX_LINE_CHARACTERS):
        if len(line) == _MAX_LINE_CHARACTERS:
            raise ValueError(f"a line is longer than {_MAX_LINE_CHARACTERS} characters")
        yield line


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
