"""`LLM` with an engine in this process: its results, its errors and its end."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cluster_link.messages import Heartbeat, NodeReport, StepTokens
from baton.errors import BatonError, ConfigError, InvalidRequest
from baton.types import Incarnation
from coordinator.core.brain import Brain
from coordinator.node_links.dispatcher import Dispatcher
from node_engine.core.node_commands import NodeCommand
from node_engine.core.step.step_batch import StepBatch
from node_engine.host.compute_thread import ComputeThread
from node_engine.paced.paced_engine import PacedEngine
from offline.endpoint import EndpointAnswer
from offline.in_process.local_link import LocalLink
from offline.llm import LLM
from offline.outputs import PromptsFailed
from offline.sampling_params import SamplingParams
from tests.paced_reference import paced_reference_tokens
from tests.unit.offline.conftest import VOCAB_SIZE, make_paced_llm
from tests.unit.package_layout import ROOT

OpenLLM = Callable[..., LLM]


def reference_tokens(prompt: list[int], count: int) -> list[int]:
    return paced_reference_tokens(prompt, count, VOCAB_SIZE)


def test_more_prompts_than_the_engine_has_slots_are_answered_in_order(llm: LLM) -> None:
    prompts = [[1 + number] * (number + 1) for number in range(12)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.token_ids == reference_tokens(prompt, 9)
        assert (answer.finish_reason, answer.stop_reason, answer.text) == ("length", None, "")
        assert output.finished
        assert output.error is None
    assert len({output.request_id for output in outputs}) == len(outputs)


@pytest.mark.parametrize(
    "given",
    [[5, 6, 7], [[5, 6, 7]], {"prompt_token_ids": [5, 6, 7]}, [{"prompt_token_ids": (5, 6, 7)}]],
)
def test_token_ids_are_a_prompt_in_every_form(llm: LLM, given: Any) -> None:
    (output,) = llm.generate(given, SamplingParams(max_tokens=3))
    assert output.prompt is None
    assert output.outputs[0].token_ids == reference_tokens([5, 6, 7], 3)


def test_no_bound_of_tokens_means_the_rest_of_the_context(open_llm: OpenLLM) -> None:
    llm = open_llm(max_model_len=64)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    outputs = llm.generate([[7] * 10, [8] * 63], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [54, 1]
    with pytest.raises(PromptsFailed) as caught:
        llm.generate([7] * 65, params)
    assert [error.code for error in caught.value.errors.values()] == ["context_length_exceeded"]


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=length, n=length) for length in (1, 2, 3)]
    outputs = llm.generate([[9]] * 3, params)
    assert [[len(each.token_ids) for each in output.outputs] for output in outputs] == [
        [1],
        [2, 2],
        [3, 3, 3],
    ]
    assert [each.index for each in outputs[2].outputs] == [0, 1, 2]


def test_no_prompts_have_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_stop_token_is_named(llm: LLM) -> None:
    tokens = reference_tokens([3, 4], 8)
    (output,) = llm.generate([3, 4], SamplingParams(max_tokens=8, stop_token_ids=[tokens[4]]))
    (answer,) = output.outputs
    assert answer.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", tokens[4])


def test_logprobs_begin_with_the_token_that_was_drawn(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate([11, 12, 13], params)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert [next(iter(position)) for position in answer.logprobs] == answer.token_ids
    for position in answer.logprobs:
        assert 3 <= len(position) <= 4
        assert {entry.rank for entry in position.values()} >= {1, 2, 3}
    total = sum(
        position[token].logprob
        for token, position in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert answer.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(each)) for each in output.prompt_logprobs if each] == [12, 13]
    for scored in output.prompt_logprobs[1:]:
        assert scored is not None
        assert {entry.rank for entry in scored.values()} - {None} == {1}


def test_the_answers_of_other_prompts_survive_a_bad_one(llm: LLM) -> None:
    with pytest.raises(PromptsFailed) as caught:
        llm.generate([[1], [VOCAB_SIZE], [2], [3] * 600], SamplingParams(max_tokens=2))
    failed = caught.value
    assert str(failed) == (
        "2 of 4 prompts failed, the answers of the others are in `outputs`: "
        "prompts[1]: prompt has token id 1000: ids are 0 to 999"
    )
    assert [len(output.outputs) for output in failed.outputs] == [1, 0, 1, 0]
    assert failed.outputs[2].outputs[0].token_ids == reference_tokens([2], 2)
    assert {index: error.code for index, error in failed.errors.items()} == {
        1: "invalid_request",
        3: "context_length_exceeded",
    }


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (7, None, "prompts is a int: it must be"),
        ([[1], 7], None, "prompts[1] is 7: it must be a text"),
        ([[1], ["a"]], None, "prompts[1] is ['a']: it must be a text"),
        ([{"text": "a"}], None, "prompts[0] is {'text': 'a'}: it must be a text"),
        ([[1], [2]], [SamplingParams()], "sampling_params has 1 entries for 2 prompts"),
        ([[1]], {"n": 2}, "sampling_params is a dict: it must be one SamplingParams"),
    ],
)
def test_arguments_of_the_wrong_form_are_refused_at_once(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, params)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 3.0}, "temperature is 3.0: it must be 0 to 2"),
        ({"n": 17}, "n is 17: it must be 1 to 16"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"logprobs": 21}, "logprobs is 21: it must be 0 to 20"),
        ({"stop": ["x"]}, "stop is given, but tokens have no text here: use stop_token_ids"),
        ({"extra_body": {"best_off": 1}}, "best_off"),
    ],
)
def test_bad_values_are_named_with_their_bound(
    llm: LLM, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptsFailed) as caught:
        llm.generate([1], SamplingParams(**params))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_memry": "1GiB"},
            "there is no setting 'kv_memry' of an engine: did you mean kv_memory",
        ),
        (
            {"dtype": "float8"},
            "dtype is 'float8': it must be one of auto, float32, bfloat16 (argument)",
        ),
        ({"max_in_flight": 0}, "max_in_flight is 0: it must be 1 to 65536"),
        ({"retry_timeout": -1.0}, "retry_timeout is -1.0: it must be above 0"),
        ({"engine": "model"}, "--model paced: there is no such folder"),
    ],
)
def test_bad_settings_are_named(open_llm: OpenLLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_llm(**settings)
    assert message in str(caught.value)


def test_closing_ends_threads_and_frees_the_cache(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with make_paced_llm(tmp_path) as llm:
        llm.generate([1], SamplingParams(max_tokens=2))
        assert list(tmp_path.glob("baton-*"))
    llm.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"log-writer"}
    assert not list(tmp_path.glob("baton-*"))
    with pytest.raises(BatonError, match="this LLM is closed"):
        llm.generate([1])


def test_closing_frees_the_engine(open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[weakref.ref[PacedEngine]] = []
    build = PacedEngine.__init__

    def remember(engine: PacedEngine, *arguments: Any, **options: Any) -> None:
        engines.append(weakref.ref(engine))
        build(engine, *arguments, **options)

    monkeypatch.setattr(PacedEngine, "__init__", remember)
    llm = open_llm()
    llm.generate([1])
    assert engines[0]() is not None
    llm.close()
    gc.collect()
    assert engines[0]() is None


@pytest.fixture
def default_interrupts() -> Iterator[None]:
    """Ctrl-C raises, also where a shell has started this process to ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("default_interrupts")
def test_an_interrupt_ends_the_requests(open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(max_num_seqs=1, paced_step_ms=5.0)
    run, steps = PacedEngine.run, iter(range(10**9))

    def interrupt_fifth_step(*arguments: Any) -> Any:
        if next(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)  # the main thread gets it
        return run(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PacedEngine, "run", interrupt_fifth_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1]] * 64, SamplingParams(max_tokens=400))
    (output,) = llm.generate([2], SamplingParams(max_tokens=2))  # not behind the others
    assert output.outputs[0].token_ids == reference_tokens([2], 2)
    assert next(steps) < 400


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
    monkeypatch.setattr("offline.in_process.local_link.HEARTBEAT_SECONDS", 0.01)
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
    monkeypatch.setattr("offline.in_process.local_link.HEARTBEAT_SECONDS", 0.01)
    run, is_full, proceed = PacedEngine.run, threading.Event(), threading.Event()
    submit, submitted = ComputeThread.submit_command, asyncio.Event()
    send_heartbeats = LocalLink.send_heartbeats

    async def send_heartbeats_later(*arguments: Any) -> None:
        await asyncio.to_thread(proceed.wait)  # before, one would say that there is no room
        await send_heartbeats(*arguments)

    monkeypatch.setattr(LocalLink, "send_heartbeats", send_heartbeats_later)
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": float("nan")}, "cannot be written as JSON: Out of range float"),
        ({"user": b"x"}, "cannot be written as JSON: Object of type bytes"),
    ],
)
def test_a_value_that_json_does_not_have_is_an_error_of_its_prompt(
    llm: LLM, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptsFailed) as caught:
        llm.generate([[1], [2]], [SamplingParams(extra_body=body), SamplingParams(max_tokens=1)])
    assert message in str(caught.value)
    assert len(caught.value.outputs[1].outputs) == 1


def test_it_works_while_the_callers_event_loop_runs(llm: LLM) -> None:
    async def main() -> int:
        return len(llm.generate([[1], [2]], SamplingParams(max_tokens=1)))

    assert asyncio.run(main()) == 2


def test_an_llm_that_is_not_closed_ends_with_the_program(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.unit.offline.conftest import make_paced_llm
llm = make_paced_llm(Path({str(tmp_path)!r}))
print(len(llm.generate([[1]])))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("1\n", "")
    assert not list(tmp_path.glob("baton-*"))


def test_an_llm_that_is_collected_ends(tmp_path: Path) -> None:
    llm = make_paced_llm(tmp_path)
    llm.generate([1])
    del llm
    gc.collect()
    assert not list(tmp_path.glob("baton-*"))


def test_an_llm_may_be_collected_on_its_own_thread(tmp_path: Path) -> None:
    llm = make_paced_llm(tmp_path)
    thread, before = llm._thread, set(threading.enumerate())
    llm.itself = llm  # type: ignore[attr-defined]  # only the collector frees it
    del llm

    async def collect() -> None:
        gc.collect()

    thread.call(collect())
    for closing in set(threading.enumerate()) - before:
        closing.join(60)
    assert not thread._thread.is_alive()
    assert not list(tmp_path.glob("baton-*"))
