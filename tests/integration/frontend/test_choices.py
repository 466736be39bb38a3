"""Several choices and several prompts, over both APIs."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from baton.errors import NodeLost
from baton.pb import generation_pb2 as pb
from baton.types import SamplingParams
from coordinator.frontend.output import (
    ChoiceStream,
    OutputProcessor,
    ResponseStream,
)
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    await_grpc_error,
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
)
from tests.new_requests import make_choices
from tests.small_tokenizers import byte_tokens, expected_ids, hello_tokenizer

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


async def test_failure_of_one_choice_cancels_the_others_before_the_client_reads(
    front: FrontendHarness,
) -> None:
    """The others must not run on until the client has taken the error."""
    front.backend.script = lambda generation: generation.emit_events(TokensEvent((1,)))
    generations = await front.backend.submit_requests(
        make_choices((1,), SamplingParams(4), 9.0, count=3)
    )
    choices = [
        ChoiceStream(one, partial(OutputProcessor, n, hello_tokenizer().create_detokenizer()), 0)
        for n, one in enumerate(generations)
    ]
    pieces = ResponseStream("m", 0, hello_tokenizer(), [(1,)], choices).output_chunks()
    generations[1].emit_events(NodeLost("node d0 is gone"))
    with pytest.raises(NodeLost):
        async for _ in pieces:
            pass
    assert [one.cancelled.is_set() for one in generations] == [True, False, True]
