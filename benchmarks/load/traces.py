"""Replay recorded workloads: arrival times, lengths and shared prefixes, without any text.

Two public formats:

- Mooncake's JSON lines: `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
  "hash_ids": [...]}`, with one id for each 512-token block of the prompt; equal ids are equal
  blocks. (Qin et al., FAST 2025.)
- Azure's CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. Its prompts share nothing, since the
  trace does not say what they share. (Patel et al., ISCA 2024.)
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
_MAX_LINE_CHARACTERS = 1 << 20
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """Requests come at the times of the trace, `speed` times as fast."""

    name: str
    speed: float = 1.0

    def __str__(self) -> str:
        return f"{self.name[:16]}@{self.speed:g}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; lengths are in tokens."""

    arrival_seconds: float  # on the trace's own clock
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # one for each 512-token block of the prompt


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, limit: int = 0) -> list[TraceRequest]:
    """Return the first `limit` requests of a trace (0: all), sorted by time.

    The first line decides the format. Raises ValueError that names the file and the line.
    """
    max_requests = min(limit or MAX_REQUESTS, MAX_REQUESTS)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(_MAX_LINE_CHARACTERS)
            file.seek(0)
            parse = _parse_mooncake if first.lstrip().startswith("{") else _parse_azure
            found = list(islice(parse(_bounded_lines(file.readline), str(path)), max_requests))
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"trace {path} is not UTF-8 text") from None
    if not found:
        raise ValueError(f"trace {path} holds no requests")
    return sorted(found, key=lambda request: request.arrival_seconds)


def plan_from_trace(
    trace: list[TraceRequest], seed: str, speed: float = 1.0, scale: float = 1.0
) -> list[PlannedRequest]:
    """Return what to send: `speed` compresses time, `scale` scales all lengths, also of blocks.

    Raises ValueError for a scale that makes blocks too short to contain their id.
    """
    if speed <= 0 or scale <= 0:
        raise ValueError(f"--speed {speed:g} and --scale-lengths {scale:g} must be above 0")
    block = max(1, round(MOONCAKE_BLOCK * scale))
    max_block_id = max((max(request.block_ids, default=0) for request in trace), default=0)
    return [
        PlannedRequest(
            start_seconds=(request.arrival_seconds - trace[0].arrival_seconds) / speed,
            prompt_tokens=_scaled_prompt(request, scale, block),
            output_tokens=max(1, round(request.output_tokens * scale)),
            seed=number,
            block_prompt=BlockPrompt(seed, request.block_ids, block, max_block_id)
            if request.block_ids
            else None,
            salt=seed,
        )
        for number, request in enumerate(trace)
    ]


def repeated_prefix_share(plan: Sequence[PlannedRequest]) -> float:
    """Return the share of prompt tokens in leading blocks that earlier requests had too.

    It is the most that a prefix cache can save.
    """
    seen: set[int] = set()
    repeated = 0
    for request in plan:
        shared = request.block_prompt
        if shared is not None:
            known = len(list(takewhile(seen.__contains__, shared.block_ids)))
            repeated += min(known * shared.block_tokens, request.prompt_tokens)
            seen.update(shared.block_ids)
    return repeated / sum(request.prompt_tokens for request in plan)


def _scaled_prompt(request: TraceRequest, scale: float, block: int) -> int:
    """Return the scaled prompt length, with 1 to `block` tokens in the last block."""
    if not request.block_ids:
        return max(1, round(request.prompt_tokens * scale))
    full_blocks_tokens = (len(request.block_ids) - 1) * block
    return full_blocks_tokens + min(
        max(round(request.prompt_tokens * scale) - full_blocks_tokens, 1), block
    )


def _parse_mooncake(lines: Iterator[str], name: str) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = decode(line)
            _require(
                parsed.timestamp >= 0 and parsed.input_length >= 1 and parsed.output_length >= 0,
                "a value below 0",
            )
            expected = -(-parsed.input_length // MOONCAKE_BLOCK)
            _require(
                len(parsed.hash_ids) == expected, f"{len(parsed.hash_ids)} hash_ids, not {expected}"
            )
            _require(min(parsed.hash_ids) >= 0, "a hash id below 0")
        except (msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        yield TraceRequest(
            parsed.timestamp / 1e3,
            parsed.input_length,
            max(1, parsed.output_length),
            tuple(parsed.hash_ids),
        )


def _parse_azure(lines: Iterator[str], name: str) -> Iterator[TraceRequest]:
    rows = csv.reader(lines)
    header = tuple(next(rows, []))
    if header != _AZURE_COLUMNS:
        raise ValueError(
            f"{name} is not a trace: "
            f"it begins neither with an object nor with {','.join(_AZURE_COLUMNS)}"
        )
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            timestamp, prompt, output = row
            arrival = datetime.datetime.fromisoformat(timestamp).timestamp()
            _require(int(prompt) >= 1 and int(output) >= 0, "a length below 1")
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        yield TraceRequest(arrival, int(prompt), max(1, int(output)))


def _bounded_lines(readline: Callable[[int], str]) -> Iterator[str]:
    while line := readline(_MAX_LINE_CHARACTERS):
        if len(line) == _MAX_LINE_CHARACTERS:
            raise ValueError(f"a line is longer than {_MAX_LINE_CHARACTERS} characters")
        yield line


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
