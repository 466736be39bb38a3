"""Both front doors over a scripted brain, on real loopback ports inside the test's own event loop."""

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx

from baton.config import Config
from baton.descriptors import descriptor_limit
from baton.errors import BatonError, Cancelled, NotFound, Overloaded, SlowReader, Unavailable
from baton.generation_defaults import GenerationDefaults
from baton.limits import ModelBounds
from baton.pb.cluster_pb2 import DrainResponse, ExplainResponse, LedgerResponse, Ratio, RatioAdvice, StatusResponse
from baton.pb.common_pb2 import Ledger, Timeline
from baton.pb.generation_pb2_grpc import GenerationStub
from baton.ratio import Split
from baton.slo import Slo
from baton.types import FinishReason, RequestId, Standing, mint_id
from coordinator import admin
from coordinator.arriving_bodies import ArrivingBodies
from coordinator.auth import AdminGate, Clients
from coordinator.core.tenants import Tenants
from coordinator.generation import Delta, Done, Event, PromptScores, Submission
from coordinator.grpc_port import GrpcPort
from coordinator.http import app
from coordinator.http.listener import Listener, bind
from coordinator.intake import Intake
from coordinator.ports import Ports
from coordinator.refusals import Refusals
from coordinator.tokenizer import NoTokenizer, Text
from coordinator.unknown_fields import REFUSED, UnknownFields

BOUNDS = ModelBounds(vocab_size=1000, max_model_len=512, cache_tokens=4096, model_digest="ab12", dtype="float32")
COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"  # a head, but its end
BUFFER = 64  # events that a generation holds for its reader


class FakeGeneration:
    """A generation that a test steers: `give` puts events in its bounded buffer, `cancelled` tells of its cancel."""

    def __init__(self, submission: Submission) -> None:
        self.id = RequestId(mint_id())
        self.submission = submission
        self.cancelled = asyncio.Event()
        self.stopped = asyncio.Event()
        self.ended = False
        self._events: deque[Event | BatonError] = deque()
        self._filled = asyncio.Event()

    def give(self, *events: Event | Exception) -> None:
        for event in events:
            if self.ended:
                return
            if len(self._events) >= BUFFER:
                event = SlowReader(f"more than {BUFFER} steps unread")
            self.ended = not isinstance(event, Delta | PromptScores)
            self._events.append(event)
        self._filled.set()

    def cancel(self) -> None:
        if not self.ended:
            self.cancelled.set()
            self.give(Cancelled("cancelled"))

    def stop(self) -> None:
        self.stopped.set()
        self.give(done(FinishReason.STOP, cached=3))

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while not self._events:
                self._filled.clear()
                await self._filled.wait()
            event = self._events.popleft()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Done):
                return


Script = Callable[[FakeGeneration], None]


def done(reason: FinishReason = FinishReason.LENGTH, cached: int = 0) -> Done:
    return Done(reason, cached, Timeline(ttft=0.5, total=1.0, attempts=1))


def count_up(generation: FakeGeneration) -> None:
    """The default script: max_tokens tokens 1, 2, 3, ..., one a step."""
    tokens = range(1, generation.submission.sampling.max_tokens + 1)
    generation.give(*(Delta((token,)) for token in tokens), done(cached=3))


@dataclass
class FakeBrain:
    """Records what it was asked; `script` answers, `refusal` refuses, `held` keeps submissions waiting."""

    script: Script = count_up
    refusal: Exception | None = None
    no_nodes: bool = False
    submissions: list[Submission] = field(default_factory=list)
    asked: list[Standing] = field(default_factory=list)
    generations: "asyncio.Queue[FakeGeneration]" = field(default_factory=asyncio.Queue)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    ratios: list[tuple[Split, float | None]] = field(default_factory=list)
    steered: list[tuple[Slo | None, float | None] | None] = field(default_factory=list)
    drained: list[tuple[str, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def bounds(self) -> ModelBounds:
        if self.no_nodes:
            raise Unavailable("no node has joined", retry_after=1.5)
        return BOUNDS

    def require_admission(self, standing: Standing, count: int, timeout: float) -> None:
        self.asked.append(standing)

    async def submit(self, submission: Submission) -> FakeGeneration:
        (generation,) = await self.submit_all([submission])
        return generation

    async def submit_all(self, submissions: Sequence[Submission]) -> list[FakeGeneration]:
        self.submissions += submissions
        self.waiting.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        if self.refusal is not None:
            raise self.refusal
        generations = [FakeGeneration(submission) for submission in submissions]
        for generation in generations:
            self.generations.put_nowait(generation)
            self.script(generation)
        return generations

    def status(self) -> StatusResponse:
        return StatusResponse(ready=True, mode="disaggregated", model="demo", queued=2)

    async def ledger(self) -> LedgerResponse:
        return LedgerResponse(ledgers=[Ledger(node="decode-0", total=10, free=10)])

    def explain(self, request: str) -> ExplainResponse:
        if request != "known":
            raise NotFound(f"there is no request {request!r}")
        return ExplainResponse(request_id=request, prompt_tokens=3)

    def drain(self, name: str, timeout: float | None) -> DrainResponse:
        self.drained.append((name, timeout))
        return DrainResponse(node=name, service="draining")

    def ratio(self) -> Ratio:
        return Ratio(prefill=1, decode=2, possible="1:2, 2:1")

    def set_ratio(self, target: Split, patience: float | None) -> Ratio:
        self.ratios.append((target, patience))
        return Ratio(has_target=True, target_prefill=target.prefill, target_decode=target.decode)

    def advise_ratio(self, slo: Slo | None) -> RatioAdvice:
        return RatioAdvice(slo=str(slo), prefill=2, decode=1)

    def auto_ratio(self, slo: Slo | None, patience: float | None) -> Ratio:
        self.steered.append((slo, patience))
        return Ratio(automatic=True)

    def manual_ratio(self) -> Ratio:
        self.steered.append(None)
        return Ratio()

    def undrain(self, name: str) -> DrainResponse:
        self.drained.remove((name, 2.5))
        return DrainResponse(node=name, service="in")

    def metrics(self) -> bytes:
        return b"# HELP baton_up x\nbaton_up 1.0\n"


class FakeReadiness:
    def __init__(self) -> None:
        self.on_change: list[Callable[[bool, str], None]] = []
        self.reason = ""

    def state(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    def become(self, reason: str) -> None:
        """Not ready for `reason`, or ready if that is empty."""
        self.reason = reason
        for callback in self.on_change:
            callback(*self.state())


class GatedText(NoTokenizer):
    """A `Text` that tokenizes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__("")
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.abandoned = asyncio.Event()

    async def encode(self, text: str, *, special: bool = True, limit: object = None) -> tuple[int, ...]:
        self.asked.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        return (1, 2, 3)


@dataclass
class Front:
    brain: FakeBrain
    readiness: FakeReadiness
    refused: list[str]  # codes, in order
    bodies: ArrivingBodies
    apps: Any  # the client-facing and the admin application
    http_port: int
    admin_port: int
    grpc_port: int
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return GenerationStub(self.channel)


def overloaded() -> Overloaded:
    return Overloaded("the queue holds 8 of 8 requests (--max-queue)", retry_after=2.2)


@asynccontextmanager
async def serving(
    *,
    text: Text | None = None,
    loading: bool = False,
    api_key: str = "",
    tenants: Tenants | None = None,
    admin_token: str = "",
    longest: float = 60.0,
    defaults: GenerationDefaults | None = None,
    unknown_fields: UnknownFields = REFUSED,
    metrics_on_http: bool = False,
    model: str = "demo",
    origins: frozenset[str] = frozenset(),
) -> AsyncIterator[Front]:
    brain, readiness, refused = FakeBrain(), FakeReadiness(), []
    refusals = Refusals(lambda error, _: refused.append(error.code))
    loaded: asyncio.Future[Text] = asyncio.get_running_loop().create_future()
    if not loading:
        loaded.set_result(text or NoTokenizer("demo has no tokenizer files"))
    intake = Intake(
        brain,
        loaded,
        model=model,
        longest=longest,
        refusals=refusals,
        defaults=defaults,
        unknown_fields=unknown_fields,
    )
    who = Clients(api_key, tenants)
    metrics = app.OperatorMetrics(brain.metrics, AdminGate(admin_token)) if metrics_on_http else None
    apps = app.build(intake, readiness, who, metrics, origins), admin.build(brain, readiness, admin_token, refusals)
    ports = Ports(Config(), descriptor_limit())
    tables = [ports.table(name) for name in ("http", "admin")]
    listeners = [Listener(one, bind("127.0.0.1", 0, "--port"), table) for one, table in zip(apps, tables, strict=True)]
    port = GrpcPort(intake, readiness, who, ports.limits["grpc"])
    port.bind("127.0.0.1", 0)
    await port.start()
    json_body = {"content-type": "application/json"}
    key = {"authorization": f"Bearer {api_key}".encode()} if api_key else {}
    running = [asyncio.create_task(listener.run_until_stopped()) for listener in listeners]
    for listener in listeners:
        await listener.listening.wait()
    try:
        async with (
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{listeners[0].port}", headers=json_body | key, timeout=30
            ) as http,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{listeners[1].port}", headers=json_body, timeout=30
            ) as admin_http,
            grpc.aio.insecure_channel(f"127.0.0.1:{port.port}") as channel,
        ):
            yield Front(
                brain=brain,
                readiness=readiness,
                refused=refused,
                bodies=intake.bodies,
                apps=apps,
                http_port=listeners[0].port,
                admin_port=listeners[1].port,
                grpc_port=port.port,
                http=http,
                admin=admin_http,
                channel=channel,
            )
    finally:
        await port.stop(grace=0.0)
        for listener in listeners:
            listener.stop()
        await asyncio.gather(*running)


async def raw_post(
    front: Front, body: object, *, receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A completion request on a connection that the test holds in its hands."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", front.http_port))
    reader, writer = await asyncio.open_connection(sock=connection)
    payload = json.dumps(body).encode()
    writer.write(COMPLETIONS + b"content-length: %d\r\n\r\n" % len(payload) + payload)
    return reader, writer


async def grpc_error(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call of either kind."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was served")
