"""`LLM` with an engine in this process: its results, its errors and its end."""

import asyncio
import gc
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

from baton.errors import BatonError, ConfigError, InvalidRequest
from node_engine.paced.paced_engine import PacedEngine
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


FORKING = """
import os, sys
from pathlib import Path
from baton.errors import BatonError
from tests.unit.offline.conftest import make_paced_llm
with make_paced_llm(Path(sys.argv[1])) as llm:
    llm.generate([[1]])
    for number in range(2):
        if os.fork() == 0:
            try:
                llm.generate([[1]])
            except BatonError as error:
                print(error, flush=True)
            if number:
                llm.close()
            sys.exit(0)
        os.wait()
        print(len(llm.generate([[1]])), len(os.listdir(sys.argv[1])), flush=True)
"""


def test_a_forked_process_leaves_its_parents_llm_alone(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    refused = "this LLM is of the process that was forked: make one in each process"
    lines = ended.stdout.splitlines()
    assert [line.partition(",")[0] for line in lines] == [refused, "1 1", refused, "1 1"]
    assert ended.stderr == ""
    assert not list(tmp_path.glob("baton-*"))
