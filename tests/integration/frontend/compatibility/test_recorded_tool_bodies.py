"""What openai, instructor and langchain-openai send for tools and JSON is answered as they read it.

`make clients CLIENT_BODIES=tests/data/tool_client_bodies` records the bodies. Each names a script
of `tests/clients/scripts.py`, which is the output here.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.types import FinishReason
from coordinator.generation import TokensEvent
from coordinator.text import tokenizer_loader
from coordinator.text.tokenizer import HfTokenizer
from tests.clients.scripted_model import build_tokenizer
from tests.clients.scripts import PERSON, SCRIPTS
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
    FakeGeneration,
    FrontendHarness,
    finished_event,
    running_frontend,
)

FOLDER = Path(__file__).resolve().parents[3] / "data" / "tool_client_bodies"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CASES = [
    pytest.param(recorded["path"], body, id=f"{name}-{index}")
    for name, recorded in RECORDED.items()
    for index, body in enumerate(recorded["bodies"])
]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontendHarness]:
    folder = tmp_path_factory.mktemp("scripted")
    build_tokenizer(folder, SCRIPTS)
    text = await tokenizer_loader.load_tokenizer(str(folder), "model")
    assert isinstance(text, HfTokenizer)

    def script(generation: FakeGeneration) -> None:
        start = text.token_text(generation.request.prompt_token_ids[-1])
        output = SCRIPTS[start.removeprefix("<|").removesuffix("|>")]
        tokens = [token_of_byte[byte] for byte in output.encode()]
        generation.emit_events(TokensEvent(tuple(tokens[:5])), TokensEvent(tuple(tokens[5:])))
        generation.emit_events(finished_event(FinishReason.STOP))

    token_of_byte = {}
    for token in range(256):
        (byte,) = text.token_bytes(token) or b""
        token_of_byte[byte] = token
    bounds = replace(MODEL_BOUNDS, max_model_len=8192, cache_tokens=8192)
    async with running_frontend(text=text, model="scripted") as running:
        running.backend.script = script
        running.backend.get_model_bounds = lambda: bounds  # type: ignore[method-assign]
        yield running


async def test_every_client_has_recorded_bodies() -> None:
    assert RECORDED.keys() == {
        "instructor_chat", "instructor_responses", "langchain_chat", "openai_chat",
        "openai_responses",
    }  # fmt: skip


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_recorded_body_gets_what_its_script_says(
    front: FrontendHarness, path: str, body: dict[str, Any]
) -> None:
    response = await front.http.post(path, json=body)
    assert response.status_code == 200, response.text
    names = re.findall(r"SCRIPT-(\w+)", json.dumps(body))
    expected = expected_output(names[-1], has_tools=bool(body.get("tools")))
    if path == "/v1/responses":
        assert read_response(response.text, is_stream=bool(body.get("stream"))) == expected
    elif body.get("stream"):
        assert read_chat_stream(response.text) == expected
    else:
        message = response.json()["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        assert (message["content"] or "", calls) == expected


def expected_output(script: str, *, has_tools: bool) -> tuple[str, list[str]]:
    """The content and the arguments of the calls."""
    bob = '{"name": "Bob", "age": 7}'
    calls = {"call": [PERSON], "calls": [PERSON, bob], "required": [PERSON]}.get(script, [])
    if script == "json" and has_tools:  # a call that was asked for by name
        calls = [PERSON]
    return ("" if calls else SCRIPTS[script]), calls


def read_response(text: str, *, is_stream: bool) -> tuple[str, list[str]]:
    told = json.loads(text.strip().rpartition("data: ")[2]) if is_stream else json.loads(text)
    items = (told["response"] if is_stream else told)["output"]
    content = "".join(part["text"] for item in items for part in item.get("content", ()))
    return content, [item["arguments"] for item in items if item["type"] == "function_call"]


def read_chat_stream(text: str) -> tuple[str, list[str]]:
    *events, _ = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    calls: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    return "".join(delta.get("content", "") for delta in deltas), list(calls.values())
