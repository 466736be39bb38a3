"""The bodies of GuideLLM, aiperf, lm_eval, vLLM, SGLang and TensorRT-LLM are answered, in the
endpoint's shape.

Where each body comes from stands in the README.md beside them.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.types import TokenLogprobs
from coordinator.generation import PromptLogprobsEvent, TokensEvent
from coordinator.text import tokenizer_loader
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
    FakeGeneration,
    FrontendHarness,
    finished_event,
    running_frontend,
)

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "tests" / "data" / "client_bodies"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
CLIENTS = {"guidellm", "aiperf", "lm_eval", "vllm_bench", "sglang_bench", "trtllm_bench"}
OBJECTS = {
    "/v1/completions": ("text_completion", "text_completion"),
    "/v1/chat/completions": ("chat.completion", "chat.completion.chunk"),
}
pytestmark = pytest.mark.asyncio(loop_scope="module")


def scored_script(generation: FakeGeneration) -> None:
    """Tokens of the model's vocabulary, scored where the request asks for it."""
    sampling = generation.request.sampling
    scored = sampling.logprobs is not None
    score = TokenLogprobs(-0.5, ((100, -0.5),))
    if sampling.prompt_logprobs is not None:
        generation.emit_events(
            PromptLogprobsEvent((score,) * (len(generation.request.prompt_token_ids) - 1))
        )
    for token in range(100, 100 + sampling.max_tokens):
        generation.emit_events(TokensEvent((token,), (score,) if scored else ()))
    generation.emit_events(finished_event())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    text = await tokenizer_loader.load_tokenizer(str(ROOT / "models" / "demo"), "model")
    async with running_frontend(text=text) as running:
        running.backend.script = scored_script
        bounds = replace(MODEL_BOUNDS, vocab_size=4096)
        running.backend.get_model_bounds = lambda: bounds  # type: ignore[method-assign]
        yield running


async def test_every_client_has_recorded_bodies() -> None:
    assert {
        f"{client}_{end}" for client in CLIENTS for end in ("completions", "chat")
    } <= RECORDED.keys()


@pytest.mark.parametrize("name", list(RECORDED))
async def test_every_recorded_body_is_answered_in_shape(front: FrontendHarness, name: str) -> None:
    recorded = RECORDED[name]
    for body in recorded["bodies"]:
        response = await front.http.post(recorded["path"], json=body)
        assert response.status_code == 200, (body, response.text)
        if body.get("stream"):
            check_stream(recorded["path"], body, response.text)
        else:
            check_response(recorded["path"], body, response.json())


def count_choices(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return (len(prompt) if several and prompt is not None else 1) * (body.get("n") or 1)


def check_response(path: str, body: dict[str, Any], whole: dict[str, Any]) -> None:
    assert whole["object"] == OBJECTS[path][0]
    assert [choice["index"] for choice in whole["choices"]] == list(range(count_choices(body)))
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body.get("echo") and body.get("logprobs"):
        scores = [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]]
        assert all(score[0] is None and None not in score[1:] for score in scores)


def check_stream(path: str, body: dict[str, Any], text: str) -> None:
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {OBJECTS[path][1]}
    ends = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ends) == list(range(count_choices(body)))
    asked = body.get("stream_options") or {}
    if asked.get("include_usage"):
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    if asked.get("continuous_usage_stats"):
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert told == sorted(told)
        assert told[-1] > 0
