"""Log probabilities of prompts and outputs, with echo, over both APIs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.limits import MAX_PROMPT_LOGPROBS
from baton.pb import generation_pb2 as pb
from baton.pb.common_pb2 import TokenIds
from baton.types import FinishReason, TokenLogprobs
from coordinator.frontend.output import PROMPT_CHUNK_TOKENS
from coordinator.generation import TokensEvent
from coordinator.text.tokenizer import HfTokenizer
from offline.answers import parse_completion
from offline.outputs import Logprob
from offline.sampling_params import SamplingParams
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    emit_counting_tokens,
    finished_event,
    running_frontend,
)
from tests.integration.frontend.scored_frontend import (
    TOP,
    expected_token,
    merge_chunks,
    post_completion,
    scored_script,
    stream_completion,
    text_of,
)
from tests.small_tokenizers import chat_tokenizer, expected_ids, hello_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[FrontendHarness]:
    async with running_frontend(text=hello_tokenizer()) as running:
        yield running


@pytest.fixture
def front(shared: FrontendHarness) -> FrontendHarness:
    brain = shared.backend
    brain.script, brain.refusal, brain.generations = scored_script, None, asyncio.Queue()
    brain.requests.clear()
    return shared


async def test_output_tokens_have_their_logprobs(front: FrontendHarness) -> None:
    answer = (await post_completion(front, prompt=[1], max_tokens=2, logprobs=1))["choices"][0]
    tokens = expected_token(0, 0), expected_token(0, 1)
    first, second = map(text_of, tokens)
    assert answer["text"] == first + second
    assert answer["logprobs"] == {
        "tokens": [first, second],
        "token_logprobs": [-float(token) for token in tokens],
        "top_logprobs": [
            {text_of(TOP): -0.25, first: -tokens[0]},
            {text_of(TOP): -0.25, second: -tokens[1]},
        ],
        "text_offset": [0, len(first)],
    }
    assert merge_chunks(await stream_completion(front, prompt=[1], max_tokens=2, logprobs=1)) == [
        answer
    ]
    for request in front.backend.requests:
        assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (1, None)


async def test_likely_tokens_of_the_same_text_keep_their_ranks(
    front: FrontendHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top_logprobs` has one entry for a text; `top_tokens` and the Python API have each token."""
    ranked = ((7, -0.25), (8, -0.5), (9, -1.0))

    def script(generation: FakeGeneration) -> None:
        generation.emit_events(TokensEvent((10,), (TokenLogprobs(-2.0, ranked),)))
        generation.emit_events(finished_event(FinishReason.LENGTH))

    texts = {7: "same", 8: "same", 9: "other", 10: "drawn"}
    monkeypatch.setattr(HfTokenizer, "token_text", lambda self, token: texts[token])
    front.backend.script = script
    answer = await post_completion(
        front, prompt=[1], max_tokens=1, logprobs=3, return_token_ids=True
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"same": -0.25, "other": -1.0, "drawn": -2.0}]
    assert logprobs["top_tokens"] == [
        [
            {"token_id": token, "token": texts[token], "logprob": logprob}
            for token, logprob in ranked
        ]
    ]
    (output,) = parse_completion(answer, None, SamplingParams(logprobs=3)).outputs
    assert output.logprobs == [
        {
            10: Logprob(-2.0, None, "drawn"),
            7: Logprob(-0.25, 1, "same"),
            8: Logprob(-0.5, 2, "same"),
            9: Logprob(-1.0, 3, "other"),
        }
    ]


async def test_echo_repeats_the_prompt(front: FrontendHarness) -> None:
    prompt = expected_ids("hello world")
    for given in ("hello world", list(prompt)):
        answer = (
            await post_completion(
                front, prompt=given, max_tokens=1, echo=True, n=2, return_token_ids=True
            )
        )["choices"]
        assert [choice["text"] for choice in answer] == [
            "hello world" + text_of(expected_token(number, 0)) for number in (0, 1)
        ]
        assert [choice["token_ids"] for choice in answer] == [
            [expected_token(0, 0)],
            [expected_token(1, 0)],
        ]
        assert all(choice["logprobs"] is None for choice in answer)
        parts = await stream_completion(
            front, prompt=given, max_tokens=1, echo=True, n=2, return_token_ids=True
        )
        assert merge_chunks(parts) == answer


async def test_echo_with_logprobs_as_lm_eval_sends_it(front: FrontendHarness) -> None:
    """Log-likelihoods of given texts: their token ids in a list, no or one token of output."""
    texts = ["hello world", "héllo"]
    prompts = [list(expected_ids(text)) for text in texts]
    for most in (0, 1):
        fields = {
            "prompt": prompts,
            "max_tokens": most,
            "echo": True,
            "logprobs": 1,
            "temperature": 0,
            "seed": 1234,
        }
        answer = await post_completion(front, **fields)
        assert answer["usage"]["completion_tokens"] == 2 * most
        for text, ids, choice in zip(texts, prompts, answer["choices"], strict=True):
            told = choice["logprobs"]
            tail = [expected_token(0, 0)] * most
            assert choice["finish_reason"] == "length"
            assert choice["text"] == text + "".join(map(text_of, tail))
            assert told["token_logprobs"] == [None, *(-float(token) for token in [*ids[1:], *tail])]
            assert told["top_logprobs"][0] is None
            assert all(top[text_of(TOP)] == -0.25 for top in told["top_logprobs"][1:])
            assert len(told["tokens"]) == len(told["text_offset"]) == len(ids) + most
            shown = [
                place
                for place, token in enumerate(told["tokens"])
                if not token.startswith("bytes:")
            ]
            for place in shown:
                assert choice["text"].startswith(told["tokens"][place], told["text_offset"][place])
        assert merge_chunks(await stream_completion(front, **fields)) == answer["choices"]
    assert all(request.sampling.max_tokens == 1 for request in front.backend.requests)


async def test_prompt_logprobs_are_computed_once_for_all_choices(front: FrontendHarness) -> None:
    """A choice that is ahead of them waits."""
    held: list[FakeGeneration] = []

    def script(generation: FakeGeneration) -> None:
        if generation.request.sampling.prompt_logprobs is None:
            scored_script(generation)
            for first in held:
                scored_script(first)
        else:
            held.append(generation)

    front.backend.script = script
    answer = (
        await post_completion(front, prompt="hello world", max_tokens=1, echo=True, logprobs=0, n=2)
    )["choices"]
    first, second = (choice["logprobs"]["token_logprobs"] for choice in answer)
    assert first[:-1] == second[:-1]
    assert len(first) == len(expected_ids("hello world")) + 1
    assert [one.sampling.prompt_logprobs for one in front.backend.requests] == [0, None]


async def test_missing_prompt_logprobs_are_an_internal_error(front: FrontendHarness) -> None:
    front.backend.script = emit_counting_tokens
    response = await front.http.post(
        "/v1/completions", json={"prompt": [1, 2], "echo": True, "logprobs": 1}
    )
    assert response.status_code == 500


async def test_prompt_logprobs_are_bounded(front: FrontendHarness) -> None:
    """They are held until they are told, and a body has room for a million tokens."""
    fields = {"prompt": [[7] * 500] * 128, "max_tokens": 1, "echo": True}
    response = await front.http.post("/v1/completions", json={**fields, "logprobs": 20})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    for part in ("logprobs is 20", "64000 tokens", str(64000 * 21), str(MAX_PROMPT_LOGPROBS)):
        assert part in response.json()["error"]["message"]
    scored = {"prompt": [[7] * 500] * 16, "max_tokens": 1, "prompt_logprobs": 8}
    response = await front.http.post("/v1/completions", json={**scored, "n": 16})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"
    assert f"n is 16: that is {8000 * 9 * 16} log" in response.json()["error"]["message"]
    assert front.backend.requests == []
    assert (await front.http.post("/v1/completions", json=fields)).status_code == 200


def expected_prompt_logprobs(prompt: list[int], top: int) -> list[Any]:
    """In the form of vLLM: the prompt's own token, then the likeliest with their ranks."""
    likeliest = {str(TOP): {"logprob": -0.25, "rank": 1, "decoded_token": text_of(TOP)}}
    return [None] + [
        {str(token): {"logprob": -float(token), "rank": None, "decoded_token": text_of(token)}}
        | (likeliest if top else {})
        for token in prompt[1:]
    ]


@pytest.mark.parametrize("top", [0, 1])
async def test_prompt_logprobs_have_the_form_of_vllm(front: FrontendHarness, top: int) -> None:
    prompts = [list(expected_ids(text)) for text in ("hello world", "hello " * PROMPT_CHUNK_TOKENS)]
    fields: dict[str, Any] = {"max_tokens": 1, "n": 2, "prompt_logprobs": top}
    answer = await post_completion(front, prompt=prompts, **fields)
    plain = await post_completion(front, prompt=prompts, max_tokens=1, n=2)
    for choice, expected in zip(answer["choices"], plain["choices"], strict=True):
        prompt = prompts[choice["index"] // 2]
        assert choice.pop("prompt_logprobs") == expected_prompt_logprobs(prompt, top)
        assert choice == expected
    asked = [request.sampling.prompt_logprobs for request in front.backend.requests]
    assert asked[:4] == [top, None, top, None]
    assert {request.sampling.logprobs for request in front.backend.requests} == {None}


async def test_prompt_logprobs_of_a_conversation() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "n": 2}
    async with running_frontend(text=chat_tokenizer()) as front:
        front.backend.script = scored_script
        scored = await front.http.post("/v1/chat/completions", json=body | {"prompt_logprobs": 1})
        assert scored.status_code == 200, scored.text
        prompt = list(front.backend.requests[0].prompt_token_ids)
        plain = await front.http.post("/v1/chat/completions", json=body)
    assert scored.json()["prompt_logprobs"] == expected_prompt_logprobs(prompt, 1)
    assert "prompt_logprobs" not in plain.json()
    assert scored.json()["choices"] == plain.json()["choices"]


async def test_echo_and_prompt_logprobs_have_their_own_counts(front: FrontendHarness) -> None:
    prompt = list(expected_ids("hello world"))
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "echo": True}
    for logprobs, top in ((0, 1), (1, 0), (None, 1)):
        (choice,) = (
            await post_completion(front, logprobs=logprobs, prompt_logprobs=top, **fields)
        )["choices"]
        assert choice.pop("prompt_logprobs") == expected_prompt_logprobs(prompt, top)
        (echoed,) = (await post_completion(front, logprobs=logprobs, **fields))["choices"]
        assert choice == echoed


async def test_prompt_logprobs_over_grpc(front: FrontendHarness) -> None:
    prompt = expected_ids("hello wörld 😀 " * 90)
    request = pb.GenerateRequest(
        token_ids=TokenIds(ids=prompt), max_tokens=1, n=2, prompt_logprobs=1
    )
    once = await front.stub.GenerateOnce(request)
    assert [score.logprob for score in once.prompt_scores] == [-float(each) for each in prompt[1:]]
    assert not once.others[0].prompt_scores
    assert not once.HasField("prompt")
    told = [
        len(message.prompt_scores)
        async for message in front.stub.Generate(request)
        if message.prompt_scores
    ]
    assert told[0] == PROMPT_CHUNK_TOKENS - 1  # without the first token
    assert sum(told) == len(prompt) - 1


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "token ids"])
async def test_long_prompt_logprobs_are_sent_in_parts(front: FrontendHarness, as_ids: bool) -> None:
    """What names twenty tokens for each of very many takes long to word, and outgrows a gRPC
    message."""
    texts = ["hello wörld 😀 " * 90, "hello " * 300]
    prompts = [list(expected_ids(text)) for text in texts] if as_ids else texts
    fields: dict[str, Any] = {
        "prompt": prompts,
        "n": 2,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    }
    answer = await post_completion(front, **fields)
    parts = await stream_completion(front, **fields)
    assert merge_chunks(parts) == answer["choices"]
    told = [
        part["choices"][0]["logprobs"]["tokens"] for part in parts if part["choices"][0]["logprobs"]
    ]
    assert max(map(len, told)) == PROMPT_CHUNK_TOKENS
    for choice in answer["choices"]:
        logprobs, text = choice["logprobs"], choice["text"]
        assert text[:-1] == texts[choice["index"] // 2]
        assert len(logprobs["tokens"]) == len(expected_ids(text[:-1])) + 1
        whole = [
            (token, text[start : start + len(token)])
            for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            if not token.startswith("bytes:")
        ]
        assert all(token == found for token, found in whole)
        assert len(whole) > PROMPT_CHUNK_TOKENS


async def test_long_prompt_logprobs_over_grpc(front: FrontendHarness) -> None:
    text = "hello wörld 😀 " * 90
    request = pb.GenerateRequest(text=text, max_tokens=1, echo=True, logprobs=1)
    once = await front.stub.GenerateOnce(request)
    echoes = [
        message.prompt
        async for message in front.stub.Generate(request)
        if message.HasField("prompt")
    ]
    assert once.prompt.text == text == "".join(echo.text for echo in echoes)
    assert (
        tuple(once.prompt.token_ids)
        == expected_ids(text)
        == tuple(token for echo in echoes for token in echo.token_ids)
    )
    assert (
        len(once.prompt.scores)
        == len(expected_ids(text)) - 1
        == sum(len(echo.scores) for echo in echoes)
    )
    assert max(len(echo.token_ids) for echo in echoes) == PROMPT_CHUNK_TOKENS
