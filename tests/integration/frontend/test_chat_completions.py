"""POST /v1/chat/completions: what is submitted, and the shapes of answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.pb import generation_pb2 as pb
from baton.types import FinishReason, TokenLogprobs
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
    FakeGeneration,
    FrontendHarness,
    emit_counting_tokens,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import byte_tokens, chat_tokenizer, expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[FrontendHarness]:
    async with running_frontend(text=chat_tokenizer()) as running:
        yield running


@pytest.fixture
def front(shared: FrontendHarness) -> FrontendHarness:
    shared.backend.script = emit_counting_tokens
    shared.backend.requests.clear()
    return shared


def text_script(text: str, reason: FinishReason = FinishReason.STOP, logprobs: bool = False) -> Any:
    def script(generation: FakeGeneration) -> None:
        for token in byte_tokens(text.encode()):
            scores = (TokenLogprobs(-0.5, ((token, -0.5), (7, -2.0))),) if logprobs else ()
            generation.emit_events(TokensEvent((token,), scores))
        generation.emit_events(finished_event(reason, cached=2))

    return script


async def post_chat(front: FrontendHarness, messages: object = None, **fields: object) -> Any:
    return await front.http.post(
        "/v1/chat/completions", json={"messages": messages or HELLO, **fields}
    )


async def stream_chat(front: FrontendHarness, **fields: object) -> list[dict[str, Any]]:
    response = await post_chat(front, stream=True, **fields)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(part) for part in parts]


async def test_chat_response(front: FrontendHarness) -> None:
    front.backend.script = text_script("héllo 😀")
    response = await post_chat(front)
    answer = response.json()
    assert isinstance(answer.pop("created"), int)
    count = len("héllo 😀".encode())
    prompt = len(expected_ids("<user>hello<assistant>"))
    assert answer == {
        "id": f"chatcmpl-{response.headers['x-baton-request-id']}",
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo 😀", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_prompt_is_rendered_and_max_tokens_defaults_to_the_rest_of_the_context(
    front: FrontendHarness,
) -> None:
    front.backend.script = text_script("x")
    talk = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "assistant", "content": "d", "tool_calls": []},
    ]
    for fields in (
        {},
        {"max_tokens": 3},
        {"max_completion_tokens": 4},
        {"add_generation_prompt": False},
    ):
        assert (await post_chat(front, talk, **fields)).status_code == 200
    prompts = [request.prompt_token_ids for request in front.backend.requests]
    rendered = "<developer>a\nb<user>Ann: c<assistant>d"
    assert prompts == [expected_ids(f"{rendered}<assistant>")] * 3 + [expected_ids(rendered)]
    limits = [request.sampling.max_tokens for request in front.backend.requests]
    assert limits == [
        MODEL_BOUNDS.max_context - len(prompts[0]),
        3,
        4,
        MODEL_BOUNDS.max_context - len(prompts[3]),
    ]


@pytest.mark.parametrize("value", ["a", 5, -(2**53), 0.5, True, None])
async def test_chat_template_kwargs_reach_the_template(front: FrontendHarness, value: Any) -> None:
    """By both front doors the template has the same value, of the same type."""
    front.backend.script = text_script("x")
    kinds = {bool: "flag", int: "whole", float: "number", str: "text"}
    worded = (
        pb.TemplateValue() if value is None else pb.TemplateValue(**{kinds[type(value)]: value})
    )
    conversation = pb.Conversation(
        messages=[pb.Message(**HELLO[0])], chat_template_kwargs={"opening": worded}
    )
    assert (await post_chat(front, chat_template_kwargs={"opening": value})).status_code == 200
    await front.stub.GenerateOnce(pb.GenerateRequest(chat=conversation))
    expected = expected_ids(f"{value}<user>hello<assistant>")
    assert [request.prompt_token_ids for request in front.backend.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({f"a{number}": 1 for number in range(33)}, "has 33 entries: at most 32"),
        ({"messages": 1}, "has the name 'messages', which is not free"),
        ({"eos_token": "x"}, "has the name 'eos_token', which is not free"),
        ({"self": 1}, "has the name 'self', which is not free"),
        ({"a b": 1}, "has the name 'a b': names are identifiers of 1 to 64 characters"),
        ({"é": 1}, "has the name 'é'"),
        ({"": 1}, "has the name ''"),
        ({"a" * 65: 1}, "names are identifiers"),
        ({"a": "x" * 4097}, "has a text of 4097 characters for 'a': at most 4096"),
        ({"a": 2**53 + 1}, "has a number beyond 9007199254740992 for 'a'"),
        ({"a": [1]}, "chat_template_kwargs is"),
        ({"a": {}}, "chat_template_kwargs is"),
        ([], "chat_template_kwargs is []"),
    ],
)
async def test_invalid_chat_template_kwargs_are_refused(
    front: FrontendHarness, arguments: Any, told: str
) -> None:
    response = await post_chat(front, chat_template_kwargs=arguments)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert told in error["message"]
    assert front.backend.requests == []


async def test_chat_stream(front: FrontendHarness) -> None:
    front.backend.script = text_script("é!")
    parts = await stream_chat(front, stream_options={"include_usage": True}, return_token_ids=True)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({(part["id"], part["created"], part["model"]) for part in parts}) == 1
    *choices, usage = parts
    deltas = [part["choices"][0]["delta"] for part in choices]
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"content": text} for text in ("", "é", "!")),
        {},
    ]
    assert [part["choices"][0]["finish_reason"] for part in choices] == [None] * 4 + ["stop"]
    tokens = [token for part in choices for token in part["choices"][0]["token_ids"]]
    assert tokens == byte_tokens("é!".encode())
    assert all(part["usage"] is None for part in choices)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


async def test_chat_logprobs(front: FrontendHarness) -> None:
    front.backend.script = text_script("é", logprobs=True)
    first, second = byte_tokens("é".encode())
    expected = [
        {
            "token": f"bytes:\\x{byte:02x}",
            "logprob": -0.5,
            "bytes": [byte],
            "top_logprobs": [
                {"token": f"bytes:\\x{byte:02x}", "logprob": -0.5, "bytes": [byte]},
                {"token": "'", "logprob": -2.0, "bytes": [39]},
            ],
        }
        for byte in "é".encode()
    ]
    whole = (await post_chat(front, logprobs=True, top_logprobs=2)).json()["choices"][0]
    assert whole["logprobs"] == {"content": expected, "refusal": None}
    assert front.backend.requests[-1].sampling.logprobs == 2
    parts = [part["choices"][0]["logprobs"] for part in await stream_chat(front, logprobs=True)]
    assert [entry for part in parts if part for entry in part["content"]] == expected
    assert front.backend.requests[-1].sampling.logprobs == 0
    assert {first, second} == set(byte_tokens("é".encode()))


async def test_stop_strings_end_the_generation(front: FrontendHarness) -> None:
    front.backend.script = lambda generation: generation.emit_events(
        *(TokensEvent((token,)) for token in byte_tokens(b"one two three"))
    )
    for streamed in (False, True):
        if streamed:
            parts = await stream_chat(front, stop=["o t", "zz"], return_token_ids=True)
            text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
            reason = parts[-1]["choices"][0]["finish_reason"]
            tokens = [token for part in parts for token in part["choices"][0]["token_ids"]]
        else:
            answer = (await post_chat(front, stop=["o t", "zz"], return_token_ids=True)).json()
            (choice,) = answer["choices"]
            text, reason, tokens = (
                choice["message"]["content"],
                choice["finish_reason"],
                choice["token_ids"],
            )
            assert answer["usage"]["completion_tokens"] == len("one two t")
        assert (text, reason, tokens) == ("one tw", "stop", byte_tokens(b"one tw"))
        generation = front.backend.generations.get_nowait()
        while not front.backend.generations.empty():
            generation = front.backend.generations.get_nowait()
        assert generation.stopped.is_set()


BAD: list[tuple[dict[str, object], str, str]] = [
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages has 0 messages"),
    ({"messages": "hello"}, "messages", "messages is of the wrong type"),
    ({"messages": [{"content": "x"}]}, "messages", "missing required field `role`"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content is missing"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages",
        "messages[0].content is of the wrong type",
    ),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages", "messages[0].role is 'king'"),
    (
        {"messages": [{"role": "user", "content": "x", "colour": 1}]},
        "messages[0].colour",
        "not a field",
    ),
    (
        {"messages": [*HELLO, {"role": "tool", "content": "x"}]},
        "messages",
        "refuses these messages: no tools here",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages",
        "messages[0].content[0] has the type 'image_url'",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages",
        "messages[0].tool_calls[0] is of the wrong type",
    ),
    (
        {"messages": [{"role": "user", "content": "x" * 2000}]},
        "messages",
        "tokens: with at least one",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
    (
        {"max_completion_tokens": 9999},
        "max_completion_tokens",
        "max_completion_tokens is 9999 after",
    ),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_tokens", "they mean the same"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    (
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs is 21: it must be 0 to 20",
    ),
    ({"logprobs": 1}, "logprobs", "logprobs is 1"),
    ({"prompt": "x"}, "prompt", "not a field"),
    ({"echo": True}, "echo", "echo is true: not available"),
    ({"stop": ["a"] * 17}, "stop", "stop has 17 strings: at most 16"),
    ({"stop": ""}, "stop", "0 characters: each must have 1 to 256"),
    ({"stop": "x" * 257}, "stop", "257 characters"),
]


@pytest.mark.parametrize(("fields", "param", "told"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_chat_requests_are_refused(
    front: FrontendHarness, fields: dict[str, object], param: str, told: str
) -> None:
    response = await front.http.post("/v1/chat/completions", json={"messages": HELLO} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert told in error["message"]
    assert "hello" not in error["message"]
    assert front.backend.requests == []


async def test_missing_template_or_tokenizer_is_reported() -> None:
    async with running_frontend() as bare:
        response = await post_chat(bare)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        assert (
            "messages are text, but demo has no tokenizer files"
            in response.json()["error"]["message"]
        )
