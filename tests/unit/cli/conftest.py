"""A fake coordinator with canned answers over real gRPC, and the command line in this process."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.cli.main import main
from baton.pb import cluster_pb2, cluster_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

Run = Callable[..., int]


@dataclass
class FakeCoordinatorServer(
    generation_pb2_grpc.GenerationServicer, cluster_pb2_grpc.ClusterServicer
):
    answers: list[generation_pb2.GenerateResponse] = field(default_factory=list)
    status: cluster_pb2.StatusResponse = field(
        default_factory=lambda: cluster_pb2.StatusResponse(ready=True)
    )
    ledger: cluster_pb2.LedgerResponse = field(default_factory=cluster_pb2.LedgerResponse)
    explanation: cluster_pb2.ExplainResponse = field(default_factory=cluster_pb2.ExplainResponse)
    drain_response: cluster_pb2.DrainResponse = field(default_factory=cluster_pb2.DrainResponse)
    ratio: cluster_pb2.Ratio = field(default_factory=cluster_pb2.Ratio)
    advice: cluster_pb2.RatioAdvice = field(default_factory=cluster_pb2.RatioAdvice)
    watch_responses: list[cluster_pb2.StatusResponse] = field(default_factory=list)
    error: tuple[grpc.StatusCode, str] | None = None
    requests: list[Any] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""

    def Generate(
        self, request: Any, context: grpc.ServicerContext
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self._record_call(request, context)
        yield from self.answers

    def Status(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.StatusResponse:
        self._record_call(request, context)
        return self.status

    def Ledger(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.LedgerResponse:
        self._record_call(request, context)
        return self.ledger

    def Explain(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.ExplainResponse:
        self._record_call(request, context)
        return self.explanation

    def Drain(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.DrainResponse:
        self._record_call(request, context)
        return self.drain_response

    def Undrain(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.DrainResponse:
        self._record_call(request, context)
        return self.drain_response

    def GetRatio(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.Ratio:
        self._record_call(request, context)
        return self.ratio

    def SetRatio(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.Ratio:
        self._record_call(request, context)
        return self.ratio

    def AdviseRatio(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.RatioAdvice:
        self._record_call(request, context)
        return self.advice

    def AutoRatio(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.Ratio:
        self._record_call(request, context)
        return self.ratio

    def ManualRatio(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.Ratio:
        self._record_call(request, context)
        return self.ratio

    def Watch(
        self, request: Any, context: grpc.ServicerContext
    ) -> Iterator[cluster_pb2.StatusResponse]:
        self._record_call(request, context)
        yield from self.watch_responses

    def _record_call(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata = {
            key: value for key, value in context.invocation_metadata() if isinstance(value, str)
        }
        if self.error:
            context.abort(*self.error)


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinatorServer]:
    fake = FakeCoordinatorServer()
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(fake, server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, server)
    fake.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(None).wait()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command line, as in `run("status", "--json")`.

    It returns the exit code.
    """

    def run_main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it
        with pytest.raises(SystemExit) as end:
            main()
        return (
            end.value.code if isinstance(end.value.code, int) else int(end.value.code is not None)
        )

    return run_main


def make_timeline() -> common_pb2.Timeline:
    report = common_pb2.HandoffReport(
        transport="shm",
        bytes=2**40,
        slabs=24,
        slabs_landed_before_last_layer=18,
        compute_seconds=0.1,
        slowed_seconds=0.004,
        exposed_seconds=0.002,
        commit_seconds=0.001,
        computed_tokens=512,
    )
    return common_pb2.Timeline(
        queue=0.01,
        reserve=0.02,
        prefill=0.1,
        transfer=0.002,
        first_token=0.003,
        ttft=0.135,
        total=0.5,
        attempts=1,
        prefill_node="prefill-0",
        decode_node="decode-0",
        handoff=report,
    )
