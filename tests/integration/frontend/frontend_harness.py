"""Both front doors over a scripted brain, on real loopback ports inside the test's own event
loop."""

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx2

from baton.config.settings import Config
from baton.errors import (
    Cancelled,
    NotFound,
    Overloaded,
    ServiceUnavailable,
    SlowReader,
)
from baton.limits import ModelBounds
from baton.models.generation_defaults import GenerationDefaults
from baton.pb.cluster_pb2 import (
    DrainResponse,
    ExplainResponse,
    LedgerResponse,
    Ratio,
    RatioAdvice,
    StatusResponse,
)
from baton.pb.common_pb2 import Ledger
from baton.pb.generation_pb2_grpc import GenerationStub
from baton.process.descriptors import get_descriptor_limit
from baton.role_split import RoleSplit
from baton.slo import Slo
from baton.types import FinishReason, Principal, Request
from coordinator.core.admission.tenants import TenantTable
from coordinator.core.common.timeline import Timeline
from coordinator.frontend.auth import AdminAuthenticator, ClientAuthenticator
from coordinator.frontend.body_budget import BodyBudgets
from coordinator.frontend.grpc.server import GrpcServer
from coordinator.frontend.http import app
from coordinator.frontend.http.server.http_server import HttpServer, bind_http_socket
from coordinator.frontend.request import RejectionCounter
from coordinator.frontend.request_intake import RequestIntake
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.generation import (
    FinishedEvent,
    GenerationEvent,
    PromptLogprobsEvent,
    TokensEvent,
)
from coordinator.operators import admin_app
from coordinator.operators.port_connections import PortConnections
from coordinator.text.tokenizer import NoTokenizer, Tokenizer
from tests.structured.fake_grammars import check_fake_grammar

MODEL_BOUNDS = ModelBounds(
    vocab_size=1000,
    max_model_len=512,
    cache_tokens=4096,
    model_digest="ab12",
    dtype="float32",
    quantization="fp8",
)
# a head, but its end
COMPLETIONS_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BUFFERED_EVENTS = 64  # events that a generation holds for its reader


class FakeGeneration:
    """A generation that a test steers: `emit_events` puts events in its bounded buffer, `cancelled`
    tells of its cancel."""

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.request = request
        self.cancelled = asyncio.Event()
        self.stopped = asyncio.Event()
        self.is_ended = False
        self._events: deque[GenerationEvent | Exception] = deque()
        self._filled = asyncio.Event()

    def emit_events(self, *events: GenerationEvent | Exception) -> None:
        for event in events:
            if self.is_ended:
                return
            if len(self._events) >= BUFFERED_EVENTS:
                event = SlowReader(f"more than {BUFFERED_EVENTS} steps unread")
            self.is_ended = not isinstance(event, TokensEvent | PromptLogprobsEvent)
            self._events.append(event)
        self._filled.set()

    def cancel(self) -> None:
        if not self.is_ended:
            self.cancelled.set()
            self.emit_events(Cancelled("cancelled"))

    def stop(self) -> None:
        self.stopped.set()
        self.emit_events(finished_event(FinishReason.STOP, cached=3))

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        while True:
            while not self._events:
                self._filled.clear()
                await self._filled.wait()
            event = self._events.popleft()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, FinishedEvent):
                return


Script = Callable[[FakeGeneration], None]


def finished_event(reason: FinishReason = FinishReason.LENGTH, cached: int = 0) -> FinishedEvent:
    return FinishedEvent(reason, cached, Timeline(ttft=0.5, total=1.0, attempts=1))


def emit_counting_tokens(generation: FakeGeneration) -> None:
    """The default script: max_tokens tokens 1, 2, 3, ..., one a step."""
    tokens = range(1, generation.request.sampling.max_tokens + 1)
    generation.emit_events(*(TokensEvent((token,)) for token in tokens), finished_event(cached=3))


@dataclass
class FakeBackend:
    """Records what it was asked; `script` answers, `refusal` refuses, `held` keeps requests
    waiting."""

    script: Script = emit_counting_tokens
    refusal: Exception | None = None
    has_no_nodes: bool = False
    requests: list[Request] = field(default_factory=list)
    admission_checks: list[Principal] = field(default_factory=list)
    generations: "asyncio.Queue[FakeGeneration]" = field(default_factory=asyncio.Queue)
    submit_gate: asyncio.Event = field(default_factory=asyncio.Event)
    submit_started: asyncio.Event = field(default_factory=asyncio.Event)
    submit_cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ratio_targets: list[tuple[RoleSplit, float | None]] = field(default_factory=list)
    auto_ratio_calls: list[tuple[Slo | None, float | None] | None] = field(default_factory=list)
    drain_calls: list[tuple[str, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.submit_gate.set()

    def get_model_bounds(self) -> ModelBounds:
        if self.has_no_nodes:
            raise ServiceUnavailable("no node has joined", retry_after=1.5)
        return MODEL_BOUNDS

    def require_admission(self, principal: Principal, count: int, timeout: float) -> None:
        self.admission_checks.append(principal)

    async def submit_request(self, request: Request) -> FakeGeneration:
        (generation,) = await self.submit_requests([request])
        return generation

    async def submit_requests(self, requests: Sequence[Request]) -> list[FakeGeneration]:
        self.requests += requests
        self.submit_started.set()
        try:
            await self.submit_gate.wait()
        except asyncio.CancelledError:
            self.submit_cancelled.set()
            raise
        if self.refusal is not None:
            raise self.refusal
        generations = [FakeGeneration(request) for request in requests]
        for generation in generations:
            self.generations.put_nowait(generation)
            self.script(generation)
        return generations

    def get_status(self) -> StatusResponse:
        return StatusResponse(ready=True, mode="disaggregated", model="demo", queued=2)

    async def collect_ledgers(self) -> LedgerResponse:
        return LedgerResponse(ledgers=[Ledger(node="decode-0", total=10, free=10)])

    def explain_request(self, request: str) -> ExplainResponse:
        if request != "known":
            raise NotFound(f"there is no request {request!r}")
        return ExplainResponse(request_id=request, prompt_tokens=3)

    def drain_node(self, name: str, timeout: float | None) -> DrainResponse:
        self.drain_calls.append((name, timeout))
        return DrainResponse(node=name, service="draining")

    @property
    def ratio(self) -> "FakeBackend":
        return self

    def get_ratio(self) -> Ratio:
        return Ratio(prefill=1, decode=2, possible="1:2, 2:1")

    def set_ratio(self, target: RoleSplit, patience: float | None) -> Ratio:
        self.ratio_targets.append((target, patience))
        return Ratio(
            has_target=True, target_prefill=target.prefill_nodes, target_decode=target.decode_nodes
        )

    def advise_ratio(self, slo: Slo | None) -> RatioAdvice:
        return RatioAdvice(slo=str(slo), prefill=2, decode=1)

    def set_auto_ratio(self, slo: Slo | None, patience: float | None) -> Ratio:
        self.auto_ratio_calls.append((slo, patience))
        return Ratio(automatic=True)

    def set_manual_ratio(self) -> Ratio:
        self.auto_ratio_calls.append(None)
        return Ratio()

    def undrain_node(self, name: str) -> DrainResponse:
        self.drain_calls.remove((name, 2.5))
        return DrainResponse(node=name, service="in")

    def render_metrics(self) -> bytes:
        return b"# HELP baton_up x\nbaton_up 1.0\n"


class FakeReadiness:
    def __init__(self) -> None:
        self.on_change: list[Callable[[bool, str], None]] = []
        self.reason = ""

    def state(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    def set_reason(self, reason: str) -> None:
        """Not ready for `reason`, or ready if that is empty."""
        self.reason = reason
        for callback in self.on_change:
            callback(*self.state())


class GatedText(NoTokenizer):
    """A `Text` that tokenizes only while its gate is open."""

    def __init__(self) -> None:
        super().__init__("")
        self.gate = asyncio.Event()
        self.encode_started = asyncio.Event()
        self.encode_cancelled = asyncio.Event()

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: object = None
    ) -> tuple[int, ...]:
        self.encode_started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.encode_cancelled.set()
            raise
        return (1, 2, 3)


@dataclass
class FrontendHarness:
    backend: FakeBackend
    readiness: FakeReadiness
    refused_codes: list[str]  # codes, in order
    body_budgets: BodyBudgets
    apps: Any  # the client-facing and the admin application
    http_port: int
    admin_port: int
    grpc_port: int
    http: httpx2.AsyncClient
    admin: httpx2.AsyncClient
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return GenerationStub(self.channel)


def overloaded_error() -> Overloaded:
    return Overloaded("the queue holds 8 of 8 requests (--max-queue)", retry_after=2.2)


@asynccontextmanager
async def running_frontend(
    *,
    text: Tokenizer | None = None,
    loading: bool = False,
    api_key: str = "",
    tenants: TenantTable | None = None,
    admin_token: str = "",
    longest: float = 60.0,
    defaults: GenerationDefaults | None = None,
    unknown_fields: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS,
    metrics_on_http: bool = False,
    model: str = "demo",
    origins: frozenset[str] = frozenset(),
) -> AsyncIterator[FrontendHarness]:
    brain, readiness, refused = FakeBackend(), FakeReadiness(), []
    refusals = RejectionCounter(lambda error, _: refused.append(error.code))
    loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    if not loading:
        loaded.set_result(text or NoTokenizer("demo has no tokenizer files"))
    intake = RequestIntake(
        brain,
        loaded,
        model=model,
        max_timeout_seconds=longest,
        rejections=refusals,
        defaults=defaults,
        unknown_fields=unknown_fields,
        check_grammar=check_fake_grammar,
    )
    who = ClientAuthenticator(api_key, tenants)
    metrics = (
        app.MetricsEndpoint(brain.render_metrics, AdminAuthenticator(admin_token))
        if metrics_on_http
        else None
    )
    apps = (
        app.build_app(intake, readiness, who, metrics, origins),
        admin_app.build_admin_app(brain, readiness, admin_token, refusals),
    )
    ports = PortConnections(Config(), get_descriptor_limit())
    tables = [ports.get_table(name) for name in ("http", "admin")]
    listeners = [
        HttpServer(one, bind_http_socket("127.0.0.1", 0, "--port"), table)
        for one, table in zip(apps, tables, strict=True)
    ]
    port = GrpcServer(intake, readiness, who, ports.limits["grpc"])
    port.bind("127.0.0.1", 0)
    await port.start()
    json_body = {b"content-type": b"application/json"}
    key = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
    running = [asyncio.create_task(listener.run_until_stopped()) for listener in listeners]
    for listener in listeners:
        await listener.listening.wait()
    try:
        async with (
            httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{listeners[0].port}",
                headers=json_body | key,
                timeout=30,
            ) as http,
            httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{listeners[1].port}", headers=json_body, timeout=30
            ) as admin_http,
            grpc.aio.insecure_channel(f"127.0.0.1:{port.port}") as channel,
        ):
            yield FrontendHarness(
                backend=brain,
                readiness=readiness,
                refused_codes=refused,
                body_budgets=intake.body_budgets,
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


async def open_raw_post(
    front: FrontendHarness, body: object, *, receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A completion request on a connection that the test holds in its hands."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", front.http_port))
    reader, writer = await asyncio.open_connection(sock=connection)
    payload = json.dumps(body).encode()
    writer.write(COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % len(payload) + payload)
    return reader, writer


async def await_grpc_error(call: Any) -> grpc.aio.AioRpcError:
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
