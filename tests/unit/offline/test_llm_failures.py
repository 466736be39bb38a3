"""`LLM` with an engine in this process whose parts fail, or have no room for a while."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster_link.messages import Heartbeat, NodeReport, StepTokens
from baton.types import Incarnation
from coordinator.core.brain import Brain
from coordinator.node_links.dispatcher import Dispatcher
from node_engine.core.node_commands import NodeCommand
from node_engine.core.step.step_batch import StepBatch
from node_engine.host.compute_thread import ComputeThread
from node_engine.paced.paced_engine import PacedEngine
from offline.endpoint import EndpointAnswer
from offline.in_process.node_connection import InProcessNodeConnection
from offline.llm import LLM
from offline.outputs import PromptsFailed
from offline.sampling_params import SamplingParams

OpenLLM = Callable[..., LLM]


def test_a_failed_engine_ends_its_requests_and_not_the_process(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm()

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(PacedEngine, "run", fail)
    for _ in range(2):
        with pytest.raises(PromptsFailed) as caught:
            llm.generate([[1], [2]], SamplingParams(max_tokens=2))
        assert {error.code for error in caught.value.errors.values()} == {"node_failed"}
        assert "the engine failed: KeyError: make a new LLM" in str(caught.value)


@pytest.mark.parametrize("kind", [StepTokens, Heartbeat])
def test_a_report_that_cannot_be_handled_ends_the_requests(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    monkeypatch.setattr("offline.in_process.node_connection.HEARTBEAT_SECONDS", 0.01)
    receive, is_broken = Dispatcher.receive_report, threading.Event()

    def fail(dispatcher: Dispatcher, sender: Incarnation, report: NodeReport) -> None:
        if is_broken.is_set() and isinstance(report, kind):
            raise KeyError("a bug")
        if not is_broken.is_set():  # later ones are lost, so that nothing else ends the requests
            receive(dispatcher, sender, report)

    monkeypatch.setattr(Dispatcher, "receive_report", fail)
    llm = open_llm()
    assert llm.generate([3], SamplingParams(max_tokens=1))
    is_broken.set()
    for _ in range(2):
        with pytest.raises(PromptsFailed) as caught:
            llm.generate([[1], [2]], SamplingParams(max_tokens=2))
        assert {error.code for error in caught.value.errors.values()} == {"node_failed"}
        assert "the scheduling failed: KeyError: make a new LLM" in str(caught.value)


def test_requests_end_also_if_the_dispatcher_cannot_end_them(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm()

    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(PacedEngine, "run", fail)
    with monkeypatch.context() as patched:
        patched.setattr(Brain, "list_active_requests", fail)
        with pytest.raises(PromptsFailed, match="the engine failed: KeyError"):
            llm.generate([[1], [2]], SamplingParams(max_tokens=2))


def test_a_request_that_was_refused_is_placed_again_when_there_is_room(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had the blocks are cancelled before the refusal arrives, so that no end of a
    request says that there is room."""
    monkeypatch.setattr("offline.in_process.node_connection.HEARTBEAT_SECONDS", 0.01)
    run, is_full, proceed = PacedEngine.run, threading.Event(), threading.Event()
    submit, submitted = ComputeThread.submit_command, asyncio.Event()
    send_heartbeats = InProcessNodeConnection.send_heartbeats

    async def send_heartbeats_later(*arguments: Any) -> None:
        await asyncio.to_thread(proceed.wait)  # before, one would say that there is no room
        await send_heartbeats(*arguments)

    monkeypatch.setattr(InProcessNodeConnection, "send_heartbeats", send_heartbeats_later)
    llm = open_llm(kv_memory="256KiB", max_num_seqs=17)  # 512 blocks of 16 tokens

    def stop_when_full(engine: PacedEngine, batch: StepBatch, *rest: Any) -> Any:
        if not is_full.is_set() and batch.slices[-1].start > 480:
            is_full.set()
            assert proceed.wait(60)
        return run(engine, batch, *rest)

    def note_command(thread: ComputeThread, command: NodeCommand) -> None:
        submit(thread, command)
        submitted.set()

    monkeypatch.setattr(PacedEngine, "run", stop_when_full)
    monkeypatch.setattr(ComputeThread, "submit_command", note_command)

    async def cancel_the_others() -> int:
        def post(prompt: list[int], max_tokens: int) -> asyncio.Task[EndpointAnswer]:
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            sent = llm._endpoint.post("/v1/completions", json.dumps(body).encode())
            return asyncio.create_task(sent)

        earlier = [post([1 + number], 511) for number in range(16)]
        await asyncio.to_thread(is_full.wait, 60)
        submitted.clear()
        last = post([2] * 400, 1)
        await asyncio.wait_for(submitted.wait(), 60)
        for request in earlier:
            request.cancel()
        await asyncio.wait(earlier)
        proceed.set()
        return (await asyncio.wait_for(last, 60)).status

    try:
        assert llm._thread.call(cancel_the_others()) == 200
    finally:
        proceed.set()
