"""Several choices, several prompts, echo and log probabilities, over both front doors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.errors import NodeLost
from baton.limits import MAX_PROMPT_LOGPROBS
from baton.pb import generation_pb2 as pb
from baton.types import SamplingParams, TokenLogprobs
from coordinator.frontend.output import (
    ECHO_CHUNK_TOKENS,
    ChoiceStream,
    OutputProcessor,
    ResponseStream,
)
from coordinator.generation import PromptLogprobsEvent, TokensEvent
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    await_grpc_error,
    emit_counting_tokens,
    finished_event,
    running_frontend,
)
from tests.new_requests import make_choices
from tests.small_tokenizers import byte_level_tokenizer, byte_tokens, expected_ids, hello_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOP = 7


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


def expected_token(choice: int, step: int) -> int:
    """A token of one letter."""
    return byte_tokens(bytes([0x30 + 8 * choice + step]))[0]


def expected_score(token: int, top: int | None) -> TokenLogprobs:
    return TokenLogprobs(-float(token), ((TOP, -0.25),)[: top or 0])


def scored_script(generation: FakeGeneration) -> None:
    """As a model: scores where they are asked for, and tokens that tell the choice and the step."""
    request = generation.request
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        scores = tuple(
            expected_score(token, sampling.prompt_logprobs)
            for token in request.prompt_token_ids[1:]
        )
        generation.emit_events(PromptLogprobsEvent(scores))
    for step in range(sampling.max_tokens):
        token = expected_token(request.choice_index, step)
        generation.emit_events(
            TokensEvent(
                (token,),
                (expected_score(token, sampling.logprobs),)
                if sampling.logprobs is not None
                else (),
            )
        )
    generation.emit_events(finished_event(cached=5))


def text_of(token: int) -> str:
    return byte_level_tokenizer().decode([token])


async def post_completion(front: FrontendHarness, **fields: object) -> Any:
    response = await front.http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream_completion(front: FrontendHarness, **fields: object) -> list[dict[str, Any]]:
    response = await front.http.post("/v1/completions", json={"stream": True, **fields})
    *parts, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]", response.text
    return [json.loads(part) for part in parts]


def merge_chunks(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream put together as those of a whole answer."""
    whole: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            told = whole.setdefault(choice["index"], choice | {"text": "", "logprobs": None})
            told["text"] += choice["text"]
            told["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                told["logprobs"] = told["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    told["logprobs"][name] += values
            if (
                told is not choice
                and "token_ids" in choice
                and choice["token_ids"] is not told["token_ids"]
            ):
                told["token_ids"] = told["token_ids"] + choice["token_ids"]
    return [whole[index] for index in sorted(whole)]


async def test_choices_are_numbered_by_prompt_then_choice(front: FrontendHarness) -> None:
    fields = {
        "prompt": [[1, 2], [3]],
        "n": 3,
        "best_of": 3,
        "max_tokens": 2,
        "first_choice": 4,
        "return_token_ids": True,
    }
    answer = await post_completion(front, **fields)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        [expected_token(number, 0), expected_token(number, 1)] for number in (4, 5, 6, 4, 5, 6)
    ]
    details = {"cached_tokens": 10}  # of the first choice of each prompt
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": details,
    }
    submitted = {
        (request.prompt_token_ids, request.choice_index) for request in front.backend.requests
    }
    assert submitted == {(prompt, number) for prompt in ((1, 2), (3,)) for number in (4, 5, 6)}
    seeds = {
        (request.prompt_token_ids, request.sampling.seed) for request in front.backend.requests
    }
    assert len(seeds) == 2
    assert len({seed for _, seed in seeds}) == 2
    streamed = await stream_completion(front, **fields)
    assert merge_chunks(streamed) == answer["choices"]


async def test_first_choice_repeats_a_single_choice(front: FrontendHarness) -> None:
    fields = {"prompt": [1, 2], "max_tokens": 2, "seed": 7, "return_token_ids": True}
    together = (await post_completion(front, n=4, **fields))["choices"]
    alone = [
        (await post_completion(front, first_choice=number, **fields))["choices"][0]
        for number in range(4)
    ]
    assert [choice["token_ids"] for choice in together] == [choice["token_ids"] for choice in alone]
    first, again = front.backend.requests[:4], front.backend.requests[4:]
    assert [(one.choice_index, one.sampling) for one in first] == [
        (one.choice_index, one.sampling) for one in again
    ]


async def test_each_choice_has_its_own_stop_string(front: FrontendHarness) -> None:
    def script(generation: FakeGeneration) -> None:
        words = [b"one stop two", b"three"][generation.request.choice_index]
        generation.emit_events(*(TokensEvent((token,)) for token in byte_tokens(words)))
        if generation.request.choice_index:
            generation.emit_events(finished_event())

    front.backend.script = script
    answer = await post_completion(front, prompt=[1], n=2, stop="stop")
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("one ", "stop"),
        ("three", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == len("one stop") + len("three")
    assert (
        merge_chunks(await stream_completion(front, prompt=[1], n=2, stop="stop"))
        == answer["choices"]
    )


async def test_failure_of_one_choice_fails_the_request(front: FrontendHarness) -> None:
    def script(generation: FakeGeneration) -> None:
        if generation.request.choice_index != 1:
            generation.emit_events(TokensEvent((1,)))
        else:
            generation.emit_events(TokensEvent((1,)), NodeLost("node d0 is gone"))

    front.backend.script = script
    for streamed in (False, True):
        response = await front.http.post(
            "/v1/completions", json={"prompt": [1], "n": 3, "stream": streamed}
        )
        assert response.status_code == (200 if streamed else 503)
        assert '"code":"node_gone"' in response.text
        assert "[DONE]" not in response.text
        for number in range(3):
            generation = await front.backend.generations.get()
            assert generation.cancelled.is_set() == (number != 1)
    error = await await_grpc_error(
        front.stub.Generate(pb.GenerateRequest(token_ids={"ids": [1]}, n=3))
    )
    assert dict(error.trailing_metadata())["baton-error-code"] == "node_gone"


async def test_client_disconnect_cancels_all_choices(front: FrontendHarness) -> None:
    front.backend.script = lambda generation: generation.emit_events(TokensEvent((1,)))
    async with front.http.stream(
        "POST", "/v1/completions", json={"prompt": [1], "n": 3, "stream": True}
    ) as response:
        assert response.status_code == 200
    for _ in range(3):
        async with asyncio.timeout(30):
            await (await front.backend.generations.get()).cancelled.wait()


async def test_logprobs(front: FrontendHarness) -> None:
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


async def test_echo(front: FrontendHarness) -> None:
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


async def test_zero_max_tokens_without_echo_is_refused(front: FrontendHarness) -> None:
    response = await front.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_grpc_returns_the_same_as_http(front: FrontendHarness) -> None:
    request = pb.GenerateRequest(
        prompts={"prompts": [{"text": "hello world"}, {"token_ids": {"ids": [7, 8]}}]},
        n=2,
        max_tokens=2,
        echo=True,
        logprobs=1,
        seed=5,
    )
    once = await front.stub.GenerateOnce(request)
    whole = [once, *once.others]
    parts = [part async for part in front.stub.Generate(request)]
    prompts = [expected_ids("hello world"), (7, 8)]
    for index, response in enumerate(whole):
        mine = [part for part in parts if part.choice == index]
        prompt = prompts[index // 2]
        assert response.choice == index
        assert list(response.token_ids) == [
            expected_token(index % 2, 0),
            expected_token(index % 2, 1),
        ]
        assert [one.logprob for one in response.scores] == [
            -float(token) for token in response.token_ids
        ]
        assert list(response.scores[0].top_ids) == [TOP]
        assert tuple(response.prompt.token_ids) == prompt
        assert [one.logprob for one in response.prompt.scores] == [
            -float(token) for token in prompt[1:]
        ]
        assert mine[0].prompt == response.prompt
        assert "".join(part.text for part in mine) == response.text
        assert [token for part in mine for token in part.token_ids] == list(response.token_ids)
        assert mine[-1].finish_reason == response.finish_reason != 0
        assert not any(part.finish_reason for part in mine[:-1])
    assert parts[-1].usage == once.usage
    assert once.usage.completion_tokens == 8
    assert not any(part.HasField("usage") for part in [*parts[:-1], *once.others])
    over_http = await post_completion(
        front, prompt=[list(prompt) for prompt in prompts], n=2, max_tokens=2, echo=True, seed=5
    )
    assert [choice["text"] for choice in over_http["choices"]] == [
        one.prompt.text + one.text for one in whole
    ]


async def test_prompt_logprobs_are_bounded(front: FrontendHarness) -> None:
    """They are held until they are told, and a body has room for a million tokens."""
    fields = {"prompt": [[7] * 500] * 128, "max_tokens": 1, "echo": True}
    response = await front.http.post("/v1/completions", json={**fields, "logprobs": 20})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    for part in ("logprobs is 20", "64000 tokens", str(64000 * 21), str(MAX_PROMPT_LOGPROBS)):
        assert part in response.json()["error"]["message"]
    assert front.backend.requests == []
    assert (await front.http.post("/v1/completions", json=fields)).status_code == 200


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
    assert max(map(len, told)) == ECHO_CHUNK_TOKENS
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
        assert len(whole) > ECHO_CHUNK_TOKENS


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
    assert max(len(echo.token_ids) for echo in echoes) == ECHO_CHUNK_TOKENS


async def test_failure_of_one_choice_cancels_the_others_before_the_client_reads(
    front: FrontendHarness,
) -> None:
    """The others must not run on until the client has taken the error."""
    front.backend.script = lambda generation: generation.emit_events(TokensEvent((1,)))
    generations = await front.backend.submit_requests(
        make_choices((1,), SamplingParams(4), 9.0, count=3)
    )
    choices = [
        ChoiceStream(one, OutputProcessor(n, hello_tokenizer().create_detokenizer()), 0)
        for n, one in enumerate(generations)
    ]
    pieces = ResponseStream("m", 0, hello_tokenizer(), [(1,)], choices).output_chunks()
    generations[1].emit_events(NodeLost("node d0 is gone"))
    with pytest.raises(NodeLost):
        async for _ in pieces:
            pass
    assert [one.cancelled.is_set() for one in generations] == [True, False, True]
