"""Clients that ask when they are due, however slow the answers are: an open loop, in one process
beside a real cluster.

Every answer is checked token by token against the paced engine's reference. Latencies are the
client's own: a refusal's counts from the moment when it is sent, a first token's from the moment
when its request was due.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests import http_exchange
from tests.paced_reference import paced_reference_tokens

REFUSED_STATUS = 429


@dataclass(frozen=True, slots=True)
class OpenLoopRequest:
    """What a client sends. `timeout_seconds` is the deadline that it states. It tries
    `max_attempts` times at most, and comes back when it is told to, up to twice as late; or after
    `retry_seconds` seconds, whatever it is told."""

    tenant: str = ""
    api_key: str = ""
    prompt_tokens: int = 64
    output_tokens: int = 16
    timeout_seconds: float = 120.0
    max_attempts: int = 1
    retry_seconds: float | None = None


@dataclass(slots=True)
class OpenLoopOutcome:
    """What came of one client. `refusal_seconds` are the seconds until it was told so,
    `retry_after_seconds` what it was told to wait; `status` is that of the last answer, or 0 for a
    connection that broke."""

    request: OpenLoopRequest
    due_at: float
    sent_at: float = 0.0
    status: int = 0
    first_token_at: float | None = None
    ended_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    refusal_seconds: list[float] = field(default_factory=list)
    retry_after_seconds: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def is_served(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def result(self) -> str:
        if self.status == 504 or self.error == "deadline_exceeded":
            return "late"
        return (
            "answered"
            if self.is_served
            else "refused"
            if self.status == REFUSED_STATUS
            else f"{self.status} {self.error}"
        )

    @property
    def ttft_seconds(self) -> float:
        assert self.first_token_at is not None, self.error
        return self.first_token_at - self.due_at


class OpenLoop:
    """Everything that one test sends to one address. `longest_token_gap_seconds`: the longest time
    without a token for anybody, while somebody waited for one. Nobody comes back after
    `closing_time`. `arrival_seed` seeds when they come."""

    def __init__(self, address: str, seed: int = 1) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._seed = self.arrival_seed = seed
        self._serial = 0
        self.waiting_clients = 0
        self.closing_time = math.inf
        self.longest_token_gap_seconds = 0.0
        self._last_token_at = 0.0

    async def run_poisson_load(
        self, ask: OpenLoopRequest, rate: float, seconds: float
    ) -> list[OpenLoopOutcome]:
        """Poisson arrivals, which depend on seed and tenant alone. Waits for all answers."""
        source = random.Random(f"{self.arrival_seed}/{ask.tenant}")
        when, began = 0.0, time.monotonic()
        async with asyncio.TaskGroup() as clients:
            asked: list[asyncio.Task[OpenLoopOutcome]] = []
            while (when := when + source.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, began + when - time.monotonic()))
                asked.append(clients.create_task(self.run_client(ask, began + when)))
        return [task.result() for task in asked]

    async def run_burst(self, ask: OpenLoopRequest, count: int) -> list[OpenLoopOutcome]:
        now = time.monotonic()
        return list(await asyncio.gather(*(self.run_client(ask, now) for _ in range(count))))

    async def measure_throughput(self, ask: OpenLoopRequest, count: int, seconds: float) -> float:
        """A closed loop of `count` clients: the requests a second that ended in the last three
        quarters of the time."""
        began = time.monotonic()
        over, ended = began + seconds, list[OpenLoopOutcome]()

        async def lane() -> None:
            while time.monotonic() < over:
                ended.append(await self.run_client(ask))

        async with asyncio.TaskGroup() as clients:
            for _ in range(count):
                clients.create_task(lane())
        return self.completion_rate(ended, began + seconds / 4, over)

    @staticmethod
    def completion_rate(outcomes: list[OpenLoopOutcome], since: float, until: float) -> float:
        """Requests a second that ended well."""
        return sum(each.is_served and since <= each.ended_at < until for each in outcomes) / (
            until - since
        )

    async def run_client(self, ask: OpenLoopRequest, due: float | None = None) -> OpenLoopOutcome:
        """One client, until it is answered or gives up."""
        outcome = OpenLoopOutcome(ask, time.monotonic() if due is None else due)
        self._serial += 1
        prompt = [
            1 + self._serial % 30_000,
            1 + self._serial // 30_000,
            1 + self._seed,
            *range(4, ask.prompt_tokens + 1),
        ]
        again = random.Random(f"{self._seed}/{self._serial}")
        for left in reversed(range(ask.max_attempts)):
            await self._attempt(outcome, prompt)
            if outcome.status != REFUSED_STATUS or not left:
                break
            told = outcome.retry_after_seconds[-1] * again.uniform(1.0, 2.0)
            rest = told if ask.retry_seconds is None else ask.retry_seconds
            if time.monotonic() + rest > self.closing_time:
                break
            await asyncio.sleep(rest)
            outcome.due_at = time.monotonic()
        outcome.ended_at = time.monotonic()
        return outcome

    async def _attempt(self, outcome: OpenLoopOutcome, prompt: list[int]) -> None:
        ask = outcome.request
        body = {
            "prompt": prompt,
            "max_tokens": ask.output_tokens,
            "stream": True,
            "return_token_ids": True,
        }
        headers = {"x-request-timeout": f"{ask.timeout_seconds:g}"}
        if ask.api_key:
            headers["authorization"] = f"Bearer {ask.api_key}"
        outcome.status, outcome.error = 0, ""
        outcome.sent_at = sent = time.monotonic()
        self._last_token_at = self._last_token_at if self.waiting_clients else sent
        self.waiting_clients += 1
        try:
            async with http_exchange.post(
                self._address, "/v1/completions", body, headers
            ) as answer:
                outcome.status = answer.status
                if answer.status == 200:
                    await self._read_stream(outcome, answer)
                    right = outcome.tokens == paced_reference_tokens(prompt, len(outcome.tokens))
                    assert right, f"a wrong token in the answer to {ask}: {outcome.tokens}"
                    whole = len(outcome.tokens) == ask.output_tokens
                    outcome.error = outcome.error or (
                        "" if whole else f"{len(outcome.tokens)} tokens"
                    )
                    return
                outcome.error = json.loads(await answer.read_body())["error"]["message"]
                if answer.status == REFUSED_STATUS:
                    outcome.refusal_seconds.append(time.monotonic() - sent)
                    outcome.retry_after_seconds.append(float(answer.headers["retry-after"]))
        except (OSError, http_exchange.ConnectionCut) as error:
            outcome.status, outcome.error = 0, repr(error)
        finally:
            self.waiting_clients -= 1

    async def _read_stream(
        self, outcome: OpenLoopOutcome, answer: http_exchange.HttpResponse
    ) -> None:
        async for line in answer.read_lines():
            if not line or line == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                outcome.error = event["error"]["code"]
            for choice in event.get("choices", ()):
                self._record_tokens(outcome, choice.get("token_ids") or ())

    def _record_tokens(
        self, outcome: OpenLoopOutcome, tokens: "list[int] | tuple[int, ...]"
    ) -> None:
        if not tokens:
            return
        now = time.monotonic()
        outcome.first_token_at = now if outcome.first_token_at is None else outcome.first_token_at
        outcome.tokens += tokens
        self.longest_token_gap_seconds = max(
            self.longest_token_gap_seconds, now - self._last_token_at
        )
        self._last_token_at = now


def check_outcomes(outcomes: list[OpenLoopOutcome], *, late: bool = False) -> Mapping[str, int]:
    """How many were answered, refused and, if that is allowed, late. Any other end is an
    AssertionError."""
    ended = Counter(each.result for each in outcomes)
    allowed = {"answered", "refused", *(["late"] if late else [])}
    assert set(ended) <= allowed, Counter(
        each.error for each in outcomes if each.result not in allowed
    )
    assert all(seconds >= 1 for each in outcomes for seconds in each.retry_after_seconds)
    return ended


def for_tenant(ask: OpenLoopRequest, name: str) -> OpenLoopRequest:
    return replace(ask, tenant=name, api_key=f"key-of-{name}")


def percentile(values: list[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
