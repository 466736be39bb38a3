"""Clients that ask when they are due, however slow the answers are: an open loop, in one process beside a real cluster.

Every answer is checked token by token against the paced engine's reference. Latencies are the client's own: a refusal's
counts from the moment when it is sent, a first token's from the moment when its request was due.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from node_engine.paced import paced_reference
from tests import http_exchange

REFUSED = 429


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client sends. `timeout` is the deadline that it states. It tries `tries` times at most, and comes back
    when it is told to, up to twice as late; or after `impatience` seconds, whatever it is told."""

    who: str = ""
    key: str = ""
    prompt: int = 64
    output: int = 16
    timeout: float = 120.0
    tries: int = 1
    impatience: float | None = None


@dataclass(slots=True)
class Outcome:
    """What came of one client. `refusals` are the seconds until it was told so, `told` what it was told to wait;
    `status` is that of the last answer, or 0 for a connection that broke."""

    ask: Ask
    due: float
    sent: float = 0.0
    status: int = 0
    first: float | None = None
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def served(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def end(self) -> str:
        if self.status == 504 or self.error == "deadline_exceeded":
            return "late"
        return "answered" if self.served else "refused" if self.status == REFUSED else f"{self.status} {self.error}"

    @property
    def ttft(self) -> float:
        assert self.first is not None, self.error
        return self.first - self.due


class OpenLoop:
    """Everything that one test sends to one address. `longest_silence`: the longest time without a token for anybody,
    while somebody waited for one. Nobody comes back after `closing`. `arrivals` seeds when they come."""

    def __init__(self, address: str, seed: int = 1) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._seed = self.arrivals = seed
        self._serial = 0
        self.waiting = 0
        self.closing = math.inf
        self.longest_silence = 0.0
        self._last_sign = 0.0

    async def offer(self, ask: Ask, rate: float, seconds: float) -> list[Outcome]:
        """Poisson arrivals, the same for the same seed and `who`; ends when the last answer has."""
        source, when, began = random.Random(f"{self.arrivals}/{ask.who}"), 0.0, time.monotonic()
        async with asyncio.TaskGroup() as clients:
            asked: list[asyncio.Task[Outcome]] = []
            while (when := when + source.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, began + when - time.monotonic()))
                asked.append(clients.create_task(self.ask(ask, began + when)))
        return [task.result() for task in asked]

    async def at_once(self, ask: Ask, count: int) -> list[Outcome]:
        now = time.monotonic()
        return list(await asyncio.gather(*(self.ask(ask, now) for _ in range(count))))

    async def lanes(self, ask: Ask, count: int, seconds: float) -> float:
        """A closed loop of `count` clients: the requests a second that ended in the last three quarters of the time."""
        began = time.monotonic()
        over, ended = began + seconds, list[Outcome]()

        async def lane() -> None:
            while time.monotonic() < over:
                ended.append(await self.ask(ask))

        async with asyncio.TaskGroup() as clients:
            for _ in range(count):
                clients.create_task(lane())
        return self.rate(ended, began + seconds / 4, over)

    @staticmethod
    def rate(outcomes: list[Outcome], since: float, until: float) -> float:
        """Requests a second that ended well."""
        return sum(each.served and since <= each.ended < until for each in outcomes) / (until - since)

    async def ask(self, ask: Ask, due: float | None = None) -> Outcome:
        """One client, until it is answered or gives up."""
        outcome = Outcome(ask, time.monotonic() if due is None else due)
        self._serial += 1
        prompt = [1 + self._serial % 30_000, 1 + self._serial // 30_000, 1 + self._seed, *range(4, ask.prompt + 1)]
        again = random.Random(f"{self._seed}/{self._serial}")
        for left in reversed(range(ask.tries)):
            await self._try(outcome, prompt)
            if outcome.status != REFUSED or not left:
                break
            told = outcome.told[-1] * again.uniform(1.0, 2.0)
            rest = told if ask.impatience is None else ask.impatience
            if time.monotonic() + rest > self.closing:
                break
            await asyncio.sleep(rest)
            outcome.due = time.monotonic()
        outcome.ended = time.monotonic()
        return outcome

    async def _try(self, outcome: Outcome, prompt: list[int]) -> None:
        ask = outcome.ask
        body = {"prompt": prompt, "max_tokens": ask.output, "stream": True, "return_token_ids": True}
        headers = {"x-request-timeout": f"{ask.timeout:g}"}
        if ask.key:
            headers["authorization"] = f"Bearer {ask.key}"
        outcome.status, outcome.error = 0, ""
        outcome.sent = sent = time.monotonic()
        self._last_sign = self._last_sign if self.waiting else sent
        self.waiting += 1
        try:
            async with http_exchange.post(self._address, "/v1/completions", body, headers) as answer:
                outcome.status = answer.status
                if answer.status == 200:
                    await self._read(outcome, answer)
                    right = outcome.tokens == paced_reference(prompt, len(outcome.tokens))
                    assert right, f"a wrong token in the answer to {ask}: {outcome.tokens}"
                    whole = len(outcome.tokens) == ask.output
                    outcome.error = outcome.error or ("" if whole else f"{len(outcome.tokens)} tokens")
                    return
                outcome.error = json.loads(await answer.body())["error"]["message"]
                if answer.status == REFUSED:
                    outcome.refusals.append(time.monotonic() - sent)
                    outcome.told.append(float(answer.headers["retry-after"]))
        except (OSError, http_exchange.Cut) as error:
            outcome.status, outcome.error = 0, repr(error)
        finally:
            self.waiting -= 1

    async def _read(self, outcome: Outcome, answer: http_exchange.Answer) -> None:
        async for line in answer.lines():
            if not line or line == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                outcome.error = event["error"]["code"]
            for choice in event.get("choices", ()):
                self._token(outcome, choice.get("token_ids") or ())

    def _token(self, outcome: Outcome, tokens: "list[int] | tuple[int, ...]") -> None:
        if not tokens:
            return
        now = time.monotonic()
        outcome.first = now if outcome.first is None else outcome.first
        outcome.tokens += tokens
        self.longest_silence = max(self.longest_silence, now - self._last_sign)
        self._last_sign = now


def held_to(outcomes: list[Outcome], *, late: bool = False) -> Mapping[str, int]:
    """How many were answered, refused and, if that is allowed, late. Any other end is an AssertionError."""
    ended = Counter(each.end for each in outcomes)
    allowed = {"answered", "refused", *(["late"] if late else [])}
    assert set(ended) <= allowed, Counter(each.error for each in outcomes if each.end not in allowed)
    assert all(seconds >= 1 for each in outcomes for seconds in each.told)
    return ended


def as_tenant(ask: Ask, name: str) -> Ask:
    return replace(ask, who=name, key=f"key-of-{name}")
