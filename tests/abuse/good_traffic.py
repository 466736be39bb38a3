"""Clients that behave, beside others that do not: what they get, and how soon.

Requests come at a steady rate, whatever becomes of those before. Half of them repeat prompts whose
answers were recorded while nothing else ran, so that a wrong token is seen; the others have prompts
that nobody has sent before, so that every one of them is prefilled and handed off. They are greedy
and in float32. The outputs of some obey a schema, which is known once the answers are recorded.
"""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from baton.pb.generation_pb2 import GenerateRequest, StructuredOutput
from baton.pb.generation_pb2_grpc import GenerationStub
from tests import http_exchange
from tests.open_loop import percentile

REFUSALS = (429, 503)
_OUTPUT = 12  # tokens of each answer
_PROMPTS = 8  # that are repeated
_CONSTRAINED_PROMPTS = 2  # likewise, with outputs of a schema
_CONSTRAINED_START = "The values in JSON,"
_SCHEMA = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 9})
_LARGE = 100_000  # bytes that make a body a large one
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
_HTTP_STATUS = {grpc.StatusCode.RESOURCE_EXHAUSTED: 429, grpc.StatusCode.UNAVAILABLE: 503}
_PATIENCE = 60.0  # seconds that a client waits for its answer


@dataclass(slots=True)
class TrafficOutcome:
    """What one client got. `status` 0 is a connection that broke. Times are seconds since the
    request was due."""

    prompt: str
    status: int = 0
    text: str = ""
    ttft_seconds: float | None = None
    ended_seconds: float = 0.0
    error: str = ""

    @property
    def result(self) -> str:
        if self.status == 200 and not self.error:
            return "answered"
        return "refused" if self.status in REFUSALS else f"{self.status} {self.error}"


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """What became of all clients of a stretch of time."""

    outcomes: Sequence[TrafficOutcome]

    @property
    def result_counts(self) -> Mapping[str, int]:
        return Counter(outcome.result for outcome in self.outcomes)

    @property
    def answered_share(self) -> float:
        return self.result_counts.get("answered", 0) / len(self.outcomes)

    @property
    def refusal_seconds(self) -> list[float]:
        return [outcome.ended_seconds for outcome in self.outcomes if outcome.result == "refused"]

    def ttft_quantile(self, share: float) -> float:
        """The quantile `share` of the time to first token, in seconds."""
        return percentile(
            [outcome.ttft_seconds for outcome in self.outcomes if outcome.ttft_seconds is not None],
            share,
        )


@dataclass(slots=True)
class GoodTraffic:
    """Sends requests to one cluster, each on a connection of its own.

    Most go over HTTP, every fourth with a body of more than 64 KiB, and every fifth over gRPC.
    Call `record_answers` before `run`."""

    http_address: str  # host:port of HTTP
    grpc_address: str
    _recorded: dict[str, str] = field(default_factory=dict)
    _prompt_numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _client_numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def record_answers(self) -> None:
        """Ask each of the prompts that are repeated once, while nothing else runs."""
        prompts = [f"def function_{number}(first, second):\n    " for number in range(_PROMPTS)]
        prompts += [f"{_CONSTRAINED_START} {number}: " for number in range(_CONSTRAINED_PROMPTS)]
        for prompt in prompts:
            outcome = await self._run_client(prompt, time.monotonic())
            assert outcome.result == "answered", outcome
            self._recorded[outcome.prompt] = outcome.text

    async def run(self, rate: float, seconds: float) -> TrafficReport:
        """`rate` requests a second for `seconds`; ends when the last of them has. Raises
        AssertionError when an answer is not the recorded one."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as clients:
            asked: list[asyncio.Task[TrafficOutcome]] = []
            for number in range(max(1, round(rate * seconds))):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                asked.append(clients.create_task(self._run_client(self._next_prompt(), due)))
        outcomes = [task.result() for task in asked]
        for outcome in outcomes:
            expected = self._recorded.get(outcome.prompt)
            if outcome.result == "answered" and expected is not None:
                assert outcome.text == expected, (
                    f"{outcome.prompt!r} was answered {outcome.text!r}, not {expected!r}"
                )
        return TrafficReport(outcomes)

    def _next_prompt(self) -> str:
        number = next(self._prompt_numbers)
        if number % 2:
            return list(self._recorded)[number // 2 % len(self._recorded)]
        return f"# Example {number} of {id(self)}.\n" + "".join(
            f"value_{number}_{line} = {line}\n" for line in range(12)
        )

    async def _run_client(self, prompt: str, due: float) -> TrafficOutcome:
        outcome, number = TrafficOutcome(prompt), next(self._client_numbers)
        try:
            async with asyncio.timeout(_PATIENCE):
                if number % 5 == 4:
                    await self._read_grpc_answer(outcome, due)
                else:
                    await self._read_answer(
                        outcome, due, {"user": "a" * _LARGE} if number % 4 == 3 else {}
                    )
        except (OSError, http_exchange.ConnectionCut, TimeoutError) as error:
            outcome.error = repr(error)
        outcome.ended_seconds = time.monotonic() - due
        return outcome

    async def _read_grpc_answer(self, outcome: TrafficOutcome, due: float) -> None:
        request = GenerateRequest(
            text=outcome.prompt, max_tokens=_OUTPUT, temperature=0, ignore_eos=True
        )
        if outcome.prompt.startswith(_CONSTRAINED_START):
            request.structured_output.CopyFrom(StructuredOutput(json=_SCHEMA))
        try:
            async with grpc.aio.insecure_channel(
                self.grpc_address, options=_OWN_CONNECTION
            ) as channel:
                async for message in GenerationStub(channel).Generate(request, timeout=_PATIENCE):
                    outcome.ttft_seconds = outcome.ttft_seconds or time.monotonic() - due
                    outcome.text += message.text
            outcome.status = 200
        except grpc.aio.AioRpcError as error:
            outcome.error = f"{error.code().name} {error.details()}"[:200]
            # Only what the coordinator refused has a code of its own: a connection that broke has
            # none.
            if any(key == "baton-error-code" for key, _ in error.trailing_metadata() or ()):
                outcome.status = _HTTP_STATUS.get(error.code(), 0)

    async def _read_answer(
        self, outcome: TrafficOutcome, due: float, more: Mapping[str, str]
    ) -> None:
        host, _, port = self.http_address.rpartition(":")
        body: dict[str, object] = {
            "prompt": outcome.prompt,
            "max_tokens": _OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **more,
        }
        if outcome.prompt.startswith(_CONSTRAINED_START):
            body["structured_outputs"] = {"json": _SCHEMA}
        done = False
        async with http_exchange.post((host, int(port)), "/v1/completions", body, {}) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.error = (await answer.read_body()).decode()[:200]
                return
            async for line in answer.read_lines():
                content = line.removeprefix(b"data: ")
                done |= content == b"[DONE]"
                if not content or done:
                    continue
                event = json.loads(content)
                outcome.error = outcome.error or str(event.get("error", ""))
                if event.get("choices"):
                    outcome.ttft_seconds = outcome.ttft_seconds or time.monotonic() - due
                    outcome.text += event["choices"][0]["text"]
        outcome.error = outcome.error or ("" if done else "the stream ended without [DONE]")
