"""Several choices, several prompts, echo and log probabilities, over both front doors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.errors import NodeGone
from baton.limits import MAX_PROMPT_SCORES
from baton.pb import generation_pb2 as pb
from baton.types import SamplingParams, TokenScore
from coordinator.answer import Answer, Choice
from coordinator.generation import Delta, PromptScores, Submission
from coordinator.telling import ECHO_STEP, Teller
from tests.integration.front_fixtures import FakeGeneration, Front, count_up, done, grpc_error, serving
from tests.integration.front_text import byte_level, byte_tokens, hello_tokenizer, ids_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOP = 7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Front]:
    async with serving(text=hello_tokenizer()) as running:
        yield running


@pytest.fixture
def front(shared: Front) -> Front:
    brain = shared.brain
    brain.script, brain.refusal, brain.generations = scored, None, asyncio.Queue()
    brain.submissions.clear()
    return shared


def output(choice: int, step: int) -> int:
    """A token of one letter."""
    return byte_tokens(bytes([0x30 + 8 * choice + step]))[0]


def score(token: int, top: int | None) -> TokenScore:
    return TokenScore(-float(token), ((TOP, -0.25),)[: top or 0])


def scored(generation: FakeGeneration) -> None:
    """As a model: scores where they are asked for, and tokens that tell the choice and the step."""
    submission = generation.submission
    sampling = submission.sampling
    if sampling.prompt_logprobs is not None:
        scores = tuple(score(token, sampling.prompt_logprobs) for token in submission.prompt[1:])
        generation.give(PromptScores(scores))
    for step in range(sampling.max_tokens):
        token = output(submission.choice, step)
        generation.give(Delta((token,), (score(token, sampling.logprobs),) if sampling.logprobs is not None else ()))
    generation.give(done(cached=5))


def text_of(token: int) -> str:
    return byte_level().decode([token])


async def post(front: Front, **fields: object) -> Any:
    response = await front.http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(front: Front, **fields: object) -> list[dict[str, Any]]:
    response = await front.http.post("/v1/completions", json={"stream": True, **fields})
    *parts, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]", response.text
    return [json.loads(part) for part in parts]


def gathered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
            if told is not choice and "token_ids" in choice and choice["token_ids"] is not told["token_ids"]:
                told["token_ids"] = told["token_ids"] + choice["token_ids"]
    return [whole[index] for index in sorted(whole)]


async def test_choices_are_numbered_by_prompt_then_choice(front: Front) -> None:
    fields = {
        "prompt": [[1, 2], [3]],
        "n": 3,
        "best_of": 3,
        "max_tokens": 2,
        "first_choice": 4,
        "return_token_ids": True,
    }
    answer = await post(front, **fields)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        [output(number, 0), output(number, 1)] for number in (4, 5, 6, 4, 5, 6)
    ]
    details = {"cached_tokens": 10}  # of the first choice of each prompt
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": details,
    }
    submitted = {(submission.prompt, submission.choice) for submission in front.brain.submissions}
    assert submitted == {(prompt, number) for prompt in ((1, 2), (3,)) for number in (4, 5, 6)}
    seeds = {(submission.prompt, submission.sampling.seed) for submission in front.brain.submissions}
    assert len(seeds) == 2
    assert len({seed for _, seed in seeds}) == 2
    streamed = await stream(front, **fields)
    assert gathered(streamed) == answer["choices"]


async def test_a_choice_can_be_asked_for_again(front: Front) -> None:
    fields = {"prompt": [1, 2], "max_tokens": 2, "seed": 7, "return_token_ids": True}
    together = (await post(front, n=4, **fields))["choices"]
    alone = [(await post(front, first_choice=number, **fields))["choices"][0] for number in range(4)]
    assert [choice["token_ids"] for choice in together] == [choice["token_ids"] for choice in alone]
    first, again = front.brain.submissions[:4], front.brain.submissions[4:]
    assert [(one.choice, one.sampling) for one in first] == [(one.choice, one.sampling) for one in again]


async def test_each_choice_has_its_own_stop_string(front: Front) -> None:
    def script(generation: FakeGeneration) -> None:
        words = [b"one stop two", b"three"][generation.submission.choice]
        generation.give(*(Delta((token,)) for token in byte_tokens(words)))
        if generation.submission.choice:
            generation.give(done())

    front.brain.script = script
    answer = await post(front, prompt=[1], n=2, stop="stop")
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("one ", "stop"),
        ("three", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == len("one stop") + len("three")
    assert gathered(await stream(front, prompt=[1], n=2, stop="stop")) == answer["choices"]


async def test_the_failure_of_one_choice_is_the_failure_of_all(front: Front) -> None:
    def script(generation: FakeGeneration) -> None:
        if generation.submission.choice != 1:
            generation.give(Delta((1,)))
        else:
            generation.give(Delta((1,)), NodeGone("node d0 is gone"))

    front.brain.script = script
    for streamed in (False, True):
        response = await front.http.post("/v1/completions", json={"prompt": [1], "n": 3, "stream": streamed})
        assert response.status_code == (200 if streamed else 503)
        assert '"code":"node_gone"' in response.text
        assert "[DONE]" not in response.text
        for number in range(3):
            generation = await front.brain.generations.get()
            assert generation.cancelled.is_set() == (number != 1)
    error = await grpc_error(front.stub.Generate(pb.GenerateRequest(token_ids={"ids": [1]}, n=3)))
    assert dict(error.trailing_metadata())["baton-error-code"] == "node_gone"


async def test_a_client_that_leaves_cancels_all_choices(front: Front) -> None:
    front.brain.script = lambda generation: generation.give(Delta((1,)))
    async with front.http.stream("POST", "/v1/completions", json={"prompt": [1], "n": 3, "stream": True}) as response:
        assert response.status_code == 200
    for _ in range(3):
        async with asyncio.timeout(30):
            await (await front.brain.generations.get()).cancelled.wait()


async def test_logprobs(front: Front) -> None:
    answer = (await post(front, prompt=[1], max_tokens=2, logprobs=1))["choices"][0]
    tokens = output(0, 0), output(0, 1)
    first, second = map(text_of, tokens)
    assert answer["text"] == first + second
    assert answer["logprobs"] == {
        "tokens": [first, second],
        "token_logprobs": [-float(token) for token in tokens],
        "top_logprobs": [{text_of(TOP): -0.25, first: -tokens[0]}, {text_of(TOP): -0.25, second: -tokens[1]}],
        "text_offset": [0, len(first)],
    }
    assert gathered(await stream(front, prompt=[1], max_tokens=2, logprobs=1)) == [answer]
    for submission in front.brain.submissions:
        assert (submission.sampling.logprobs, submission.sampling.prompt_logprobs) == (1, None)


async def test_echo(front: Front) -> None:
    prompt = ids_of("hello world")
    for given in ("hello world", list(prompt)):
        answer = (await post(front, prompt=given, max_tokens=1, echo=True, n=2, return_token_ids=True))["choices"]
        assert [choice["text"] for choice in answer] == [
            "hello world" + text_of(output(number, 0)) for number in (0, 1)
        ]
        assert [choice["token_ids"] for choice in answer] == [[output(0, 0)], [output(1, 0)]]
        assert all(choice["logprobs"] is None for choice in answer)
        parts = await stream(front, prompt=given, max_tokens=1, echo=True, n=2, return_token_ids=True)
        assert gathered(parts) == answer


async def test_echo_with_logprobs_as_evaluation_harnesses_ask(front: Front) -> None:
    """Log-likelihoods of given texts: their token ids in a list, no or one token of output."""
    texts = ["hello world", "héllo"]
    prompts = [list(ids_of(text)) for text in texts]
    for most in (0, 1):
        fields = {"prompt": prompts, "max_tokens": most, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
        answer = await post(front, **fields)
        assert answer["usage"]["completion_tokens"] == 2 * most
        for text, ids, choice in zip(texts, prompts, answer["choices"], strict=True):
            told = choice["logprobs"]
            tail = [output(0, 0)] * most
            assert choice["finish_reason"] == "length"
            assert choice["text"] == text + "".join(map(text_of, tail))
            assert told["token_logprobs"] == [None, *(-float(token) for token in [*ids[1:], *tail])]
            assert told["top_logprobs"][0] is None
            assert all(top[text_of(TOP)] == -0.25 for top in told["top_logprobs"][1:])
            assert len(told["tokens"]) == len(told["text_offset"]) == len(ids) + most
            shown = [place for place, token in enumerate(told["tokens"]) if not token.startswith("bytes:")]
            for place in shown:
                assert choice["text"].startswith(told["tokens"][place], told["text_offset"][place])
        assert gathered(await stream(front, **fields)) == answer["choices"]
    assert all(submission.sampling.max_tokens == 1 for submission in front.brain.submissions)


async def test_the_scores_of_a_prompt_are_computed_once(front: Front) -> None:
    """A choice that is ahead of them waits."""
    held: list[FakeGeneration] = []

    def script(generation: FakeGeneration) -> None:
        if generation.submission.sampling.prompt_logprobs is None:
            scored(generation)
            for first in held:
                scored(first)
        else:
            held.append(generation)

    front.brain.script = script
    answer = (await post(front, prompt="hello world", max_tokens=1, echo=True, logprobs=0, n=2))["choices"]
    first, second = (choice["logprobs"]["token_logprobs"] for choice in answer)
    assert first[:-1] == second[:-1]
    assert len(first) == len(ids_of("hello world")) + 1
    assert [one.sampling.prompt_logprobs for one in front.brain.submissions] == [0, None]


async def test_scores_that_never_come_are_a_defect(front: Front) -> None:
    front.brain.script = count_up
    response = await front.http.post("/v1/completions", json={"prompt": [1, 2], "echo": True, "logprobs": 1})
    assert response.status_code == 500


async def test_without_echo_no_output_is_an_error(front: Front) -> None:
    response = await front.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_grpc_tells_the_same(front: Front) -> None:
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
    prompts = [ids_of("hello world"), (7, 8)]
    for index, response in enumerate(whole):
        mine = [part for part in parts if part.choice == index]
        prompt = prompts[index // 2]
        assert response.choice == index
        assert list(response.token_ids) == [output(index % 2, 0), output(index % 2, 1)]
        assert [one.logprob for one in response.scores] == [-float(token) for token in response.token_ids]
        assert list(response.scores[0].top_ids) == [TOP]
        assert tuple(response.prompt.token_ids) == prompt
        assert [one.logprob for one in response.prompt.scores] == [-float(token) for token in prompt[1:]]
        assert mine[0].prompt == response.prompt
        assert "".join(part.text for part in mine) == response.text
        assert [token for part in mine for token in part.token_ids] == list(response.token_ids)
        assert mine[-1].finish_reason == response.finish_reason != 0
        assert not any(part.finish_reason for part in mine[:-1])
    assert parts[-1].usage == once.usage
    assert once.usage.completion_tokens == 8
    assert not any(part.HasField("usage") for part in [*parts[:-1], *once.others])
    over_http = await post(front, prompt=[list(prompt) for prompt in prompts], n=2, max_tokens=2, echo=True, seed=5)
    assert [choice["text"] for choice in over_http["choices"]] == [one.prompt.text + one.text for one in whole]


async def test_scores_of_prompts_are_bounded(front: Front) -> None:
    """They are held until they are told, and a body has room for a million tokens."""
    fields = {"prompt": [[7] * 500] * 128, "max_tokens": 1, "echo": True}
    response = await front.http.post("/v1/completions", json={**fields, "logprobs": 20})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    for part in ("logprobs is 20", "64000 tokens", str(64000 * 21), str(MAX_PROMPT_SCORES)):
        assert part in response.json()["error"]["message"]
    assert front.brain.submissions == []
    assert (await front.http.post("/v1/completions", json=fields)).status_code == 200


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "token ids"])
async def test_a_long_scored_prompt_is_told_in_parts(front: Front, as_ids: bool) -> None:
    """What names twenty tokens for each of very many takes long to word, and outgrows a gRPC message."""
    texts = ["hello wörld 😀 " * 90, "hello " * 300]
    prompts = [list(ids_of(text)) for text in texts] if as_ids else texts
    fields: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 1}
    answer = await post(front, **fields)
    parts = await stream(front, **fields)
    assert gathered(parts) == answer["choices"]
    told = [part["choices"][0]["logprobs"]["tokens"] for part in parts if part["choices"][0]["logprobs"]]
    assert max(map(len, told)) == ECHO_STEP
    for choice in answer["choices"]:
        logprobs, text = choice["logprobs"], choice["text"]
        assert text[:-1] == texts[choice["index"] // 2]
        assert len(logprobs["tokens"]) == len(ids_of(text[:-1])) + 1
        whole = [
            (token, text[start : start + len(token)])
            for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            if not token.startswith("bytes:")
        ]
        assert all(token == found for token, found in whole)
        assert len(whole) > ECHO_STEP


async def test_a_long_scored_prompt_over_grpc(front: Front) -> None:
    text = "hello wörld 😀 " * 90
    request = pb.GenerateRequest(text=text, max_tokens=1, echo=True, logprobs=1)
    once = await front.stub.GenerateOnce(request)
    echoes = [message.prompt async for message in front.stub.Generate(request) if message.HasField("prompt")]
    assert once.prompt.text == text == "".join(echo.text for echo in echoes)
    assert tuple(once.prompt.token_ids) == ids_of(text) == tuple(token for echo in echoes for token in echo.token_ids)
    assert len(once.prompt.scores) == len(ids_of(text)) - 1 == sum(len(echo.scores) for echo in echoes)
    assert max(len(echo.token_ids) for echo in echoes) == ECHO_STEP


async def test_the_failure_of_one_choice_ends_the_others_though_nobody_reads(front: Front) -> None:
    """The others must not run on until the client has taken the error."""
    front.brain.script = lambda generation: generation.give(Delta((1,)))
    generations = await front.brain.submit_all([Submission((1,), SamplingParams(4), 9.0, choice=n) for n in range(3)])
    choices = [Choice(one, Teller(n, hello_tokenizer().detokenizer()), 0) for n, one in enumerate(generations)]
    pieces = Answer("m", 0, hello_tokenizer(), [(1,)], choices).pieces()
    generations[1].give(NodeGone("node d0 is gone"))
    with pytest.raises(NodeGone):
        async for _ in pieces:
            pass
    assert [one.cancelled.is_set() for one in generations] == [True, False, True]
