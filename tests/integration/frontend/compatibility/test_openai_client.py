"""The official client and curl, which know nothing of us, understand what we say."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.errors import NodeLost, ShuttingDown
from baton.types import FinishReason, TokenLogprobs
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    finished_event,
    overloaded_error,
    running_frontend,
)
from tests.small_tokenizers import byte_tokens, chat_tokenizer, expected_ids

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "sesame"
OUTPUT_TEXT = "héllo 😀"
CHAT_MESSAGES = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "hello"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[FrontendHarness]:
    async with running_frontend(text=chat_tokenizer(), api_key=KEY) as running:
        yield running


@pytest.fixture
def front(shared: FrontendHarness) -> FrontendHarness:
    shared.backend.refusal, shared.backend.script = None, text_script
    shared.backend.requests.clear()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def user(front: FrontendHarness) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=url(front), api_key=KEY, max_retries=0) as client:
        yield client


def url(front: FrontendHarness) -> str:
    return f"http://127.0.0.1:{front.http_port}/v1"


def text_script(generation: FakeGeneration) -> None:
    """One token for each byte, so that characters come in parts."""
    wanted = generation.request.sampling.logprobs
    for token in byte_tokens(OUTPUT_TEXT.encode()):
        generation.emit_events(
            TokensEvent(
                (token,), (TokenLogprobs(-0.5, ((token, -0.5),)),) if wanted is not None else ()
            )
        )
    generation.emit_events(finished_event(FinishReason.STOP))


async def test_openai_client_completions(user: Any) -> None:
    whole = await user.completions.create(
        model="demo", prompt="hello", max_tokens=8, temperature=0, user="me"
    )
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (OUTPUT_TEXT, "stop")
    assert whole.usage.completion_tokens == len(OUTPUT_TEXT.encode())
    stream = await user.completions.create(
        model="demo", prompt="hello", stream=True, stream_options={"include_usage": True}, seed=1
    )
    parts = [part async for part in stream]
    assert "".join(choice.text for part in parts for choice in part.choices) == OUTPUT_TEXT
    assert parts[-1].usage.total_tokens == parts[-1].usage.prompt_tokens + len(OUTPUT_TEXT.encode())
    assert [model.id async for model in await user.models.list()] == ["demo"]


async def test_openai_client_chat(user: Any, front: FrontendHarness) -> None:
    whole = await user.chat.completions.create(
        model="demo",
        messages=CHAT_MESSAGES,
        max_completion_tokens=64,
        logprobs=True,
        top_logprobs=1,
        n=2,
        metadata={"a": "b"},
    )
    assert [choice.message.content for choice in whole.choices] == [OUTPUT_TEXT] * 2
    assert (whole.choices[0].message.role, whole.choices[0].finish_reason) == ("assistant", "stop")
    scores = whole.choices[1].logprobs.content
    assert bytes(byte for score in scores for byte in score.bytes).decode() == OUTPUT_TEXT
    assert scores[0].top_logprobs[0].logprob == -0.5
    assert front.backend.requests[0].prompt_token_ids == expected_ids(
        "<developer>Be brief.<user>hello<assistant>"
    )
    stream = await user.chat.completions.create(
        model="demo",
        messages=CHAT_MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=64,
    )
    parts = [part async for part in stream]
    choices = [part.choices[0] for part in parts if part.choices]
    assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in choices) == OUTPUT_TEXT
    assert choices[-1].finish_reason == "stop"
    assert parts[-1].usage.completion_tokens == len(OUTPUT_TEXT.encode())


async def test_openai_client_stream_helper(user: Any) -> None:
    async with user.chat.completions.stream(
        model="demo", messages=CHAT_MESSAGES, max_tokens=64
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == OUTPUT_TEXT


async def test_synchronous_openai_client(front: FrontendHarness) -> None:
    def talk() -> list[str]:
        with openai.OpenAI(base_url=url(front), api_key=KEY, max_retries=0) as client:
            whole = client.chat.completions.create(
                model="demo", messages=CHAT_MESSAGES, max_tokens=64
            )
            stream = client.chat.completions.create(
                model="demo", messages=CHAT_MESSAGES, max_tokens=64, stream=True
            )
            streamed = "".join(part.choices[0].delta.content or "" for part in stream)
            completed = client.completions.create(model="demo", prompt=[[1], [2]], stop=["zzz"])
            return [
                whole.choices[0].message.content,
                streamed,
                *(choice.text for choice in completed.choices),
            ]

    assert await asyncio.to_thread(talk) == [OUTPUT_TEXT] * 4


async def test_openai_client_error_classes(front: FrontendHarness, user: Any) -> None:
    async def ask(who: Any, **fields: object) -> Any:
        return await who.chat.completions.create(
            **{"model": "demo", "messages": CHAT_MESSAGES, "max_tokens": 64, **fields}
        )

    async with openai.AsyncOpenAI(base_url=url(front), api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await ask(stranger)
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(user, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await ask(user, temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.BadRequestError, match="tools is"):
        await ask(user, tools=[{"type": "function", "function": {"name": "f"}}])
    front.backend.refusal = overloaded_error()
    with pytest.raises(openai.RateLimitError) as busy:
        await ask(user)
    assert busy.value.response.headers["retry-after"] == "3"
    front.backend.refusal = ShuttingDown("the cluster is stopping")
    with pytest.raises(openai.InternalServerError) as stopping:
        await ask(user)
    assert stopping.value.status_code == 503


async def test_a_failure_in_the_middle_of_a_stream_raises(
    front: FrontendHarness, user: Any
) -> None:
    front.backend.script = lambda generation: generation.emit_events(
        TokensEvent((1,)), NodeLost("node d0 is gone")
    )
    for create, prompt in (
        (user.completions.create, {"prompt": [1]}),
        (user.chat.completions.create, {"messages": CHAT_MESSAGES}),
    ):
        stream = await create(model="demo", max_tokens=64, stream=True, **prompt)
        with pytest.raises(openai.APIError, match="node d0 is gone"):
            [part async for part in stream]


async def curl(front: FrontendHarness, path: str, body: object, *flags: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--max-time", "20", "-N", "-w", "\n%{http_code}", *flags),
        *("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"),
        *("-d", json.dumps(body), f"http://127.0.0.1:{front.http_port}{path}"),
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await process.communicate()
    text, _, status = told.decode().rpartition("\n")
    return int(status), text


async def test_curl_request(front: FrontendHarness) -> None:
    status, told = await curl(
        front, "/v1/chat/completions", {"messages": CHAT_MESSAGES, "max_tokens": 64}
    )
    assert (status, json.loads(told)["choices"][0]["message"]["content"]) == (200, OUTPUT_TEXT)
    status, told = await curl(
        front, "/v1/chat/completions", {"messages": CHAT_MESSAGES, "max_tokens": 64, "stream": True}
    )
    *events, end, rest = told.split("\n\n")
    assert (status, end, rest) == (200, "data: [DONE]", "")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == OUTPUT_TEXT
    status, told = await curl(front, "/v1/completions", {"prompt": "x", "max_tokens": "many"})
    assert (status, json.loads(told)["error"]["param"]) == (400, "max_tokens")
    large = {"prompt": "x" * 70_000}  # so that it asks to continue first
    status, told = await curl(front, "/v1/completions", large, "-H", "Expect: 100-continue")
    assert (status, json.loads(told)["error"]["code"]) == (400, "context_length_exceeded")
