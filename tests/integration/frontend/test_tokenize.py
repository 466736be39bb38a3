"""POST /tokenize and /detokenize."""

from typing import Any

import pytest

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.tokenizer import HfTokenizer
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
    FrontendHarness,
    running_frontend,
)
from tests.small_tokenizers import (
    EOS_TOKEN,
    byte_level_tokenizer,
    chat_tokenizer,
    expected_ids,
    hello_tokenizer,
)


async def post(front: FrontendHarness, path: str, **fields: object) -> Any:
    return await front.http.post(path, json=fields)


async def test_tokenize_and_detokenize_round_trip() -> None:
    async with running_frontend(text=chat_tokenizer()) as front:
        text = f"héllo {EOS_TOKEN} 😀"
        ids = list(expected_ids(text))
        answer = (await post(front, "/tokenize", prompt=text, model="demo")).json()
        expected = {
            "count": len(ids),
            "max_model_len": MODEL_BOUNDS.max_context,
            "tokens": ids,
            "token_strs": None,
        }
        assert answer == expected
        named = (await post(front, "/tokenize", prompt="hello", return_token_strs=True)).json()
        assert "".join(named["token_strs"]) == "hello"
        assert (await post(front, "/detokenize", tokens=ids)).json() == {"prompt": text}
        assert (await post(front, "/detokenize", tokens=[])).json() == {"prompt": ""}


async def test_tokenize_chat_messages() -> None:
    async with running_frontend(text=chat_tokenizer()) as front:
        talk = [{"role": "user", "content": "hello"}]
        for fields, rendered in (
            ({}, "<user>hello<assistant>"),
            ({"add_generation_prompt": False}, "<user>hello"),
            (
                {"chat_template_kwargs": {"opening": "!", "enable_thinking": False}},
                "!<user>hello<assistant>",
            ),
        ):
            answer = (await post(front, "/tokenize", messages=talk, **fields)).json()
            assert tuple(answer["tokens"]) == expected_ids(rendered)


@pytest.mark.parametrize(
    ("choice", "rendered"), [({}, "add:a"), ({"tool_choice": "none"}, "a"), ({"tools": []}, "a")]
)
async def test_tokenize_shows_the_tools_of_an_answer(choice: Any, rendered: str) -> None:
    template = ChatTemplate(
        "{% for tool in tools or () %}{{ tool.function.name }}:{% endfor %}"
        "{{ messages[0].content }}",
        {},
    )
    tool = {"type": "function", "function": {"name": "add"}}
    text = HfTokenizer(byte_level_tokenizer(), bos=None, template=template)
    async with running_frontend(text=text) as front:
        fields = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], **choice}
        answer = (await post(front, "/tokenize", **fields)).json()
        assert byte_level_tokenizer().decode(answer["tokens"]) == rendered
        bad = await post(front, "/tokenize", **fields | {"tool_choice": "any"})
        assert bad.json()["error"]["param"] == "tool_choice"


BAD: list[tuple[str, dict[str, object], str, str]] = [
    ("/tokenize", {}, "prompt", "give prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": []}, "prompt", "give prompt or messages"),
    ("/tokenize", {"prompt": [1]}, "prompt", "wrong type"),
    ("/tokenize", {"prompt": "x", "colour": 1}, "colour", "not a field"),
    (
        "/tokenize",
        {"prompt": "x", "chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs",
        "not a conversation",
    ),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": "x"}]},
        "messages",
        "the model has none",
    ),
    ("/detokenize", {}, "tokens", "tokens is missing"),
    ("/detokenize", {"tokens": "x"}, "tokens", "wrong type"),
    (
        "/detokenize",
        {"tokens": [MODEL_BOUNDS.vocab_size]},
        "tokens",
        f"ids are 0 to {MODEL_BOUNDS.vocab_size - 1}",
    ),
    ("/detokenize", {"tokens": [-1]}, "tokens", "tokens has -1"),
]


async def test_bad_tokenize_requests_are_refused() -> None:
    async with running_frontend(text=hello_tokenizer()) as front:
        for path, fields, param, told in BAD:
            response = await post(front, path, **fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert told in error["message"]
        assert (await post(front, "/tokenize", prompt="x", model="other")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})]
)
async def test_tokenize_without_a_tokenizer_is_refused(path: str, body: dict[str, object]) -> None:
    async with running_frontend() as front:
        response = await post(front, path, **body)
        assert response.status_code == 400
        assert "demo has no tokenizer files" in response.json()["error"]["message"]
