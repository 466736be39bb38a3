"""The shapes of answers, whole and streamed, over both front doors."""

import json
from typing import Any

from baton.models.generation_defaults import GenerationDefaults
from baton.pb import common_pb2
from baton.pb import generation_pb2 as pb
from baton.types import FinishReason
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
    FakeGeneration,
    FrontendHarness,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import byte_tokens, chat_tokenizer, hello_tokenizer


def token_script(*tokens: int, reason: FinishReason = FinishReason.LENGTH) -> Any:
    def script(generation: FakeGeneration) -> None:
        generation.emit_events(
            *(TokensEvent((token,)) for token in tokens), finished_event(reason, cached=2)
        )

    return script


async def stream_chunks(front: FrontendHarness, **fields: object) -> list[Any]:
    """The payloads of a stream's events, in order."""
    found: list[Any] = []
    async with front.http.stream(
        "POST", "/v1/completions", json={"stream": True, **fields}
    ) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                payload = line.removeprefix("data: ")
                found.append(payload if payload == "[DONE]" else json.loads(payload))
    return found


async def test_completion_response() -> None:
    async with running_frontend() as front:
        response = await front.http.post(
            "/v1/completions", json={"prompt": [7, 8, 9], "max_tokens": 4}
        )
        answer = response.json()
        created = answer.pop("created")
        assert isinstance(created, int)
        assert answer == {
            "id": f"cmpl-{response.headers['x-baton-request-id']}",
            "object": "text_completion",
            "model": "demo",
            "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 3},
            },
        }


async def test_completion_stream() -> None:
    async with running_frontend(text=hello_tokenizer()) as front:
        tokenizer = hello_tokenizer()
        ids = await tokenizer.encode("héllo 😀")
        front.backend.script = token_script(*ids, reason=FinishReason.STOP)
        *parts, end = await stream_chunks(front, prompt="hello", return_token_ids=True)
        assert end == "[DONE]"
        assert (
            len({(part["id"], part["created"], part["model"], part["object"]) for part in parts})
            == 1
        )
        choices = [part["choices"][0] for part in parts]
        assert [choice["finish_reason"] for choice in choices] == [None] * len(ids) + ["stop"]
        assert (choices[-1]["text"], choices[-1]["token_ids"]) == ("", [])
        assert "".join(choice["text"] for choice in choices) == "héllo 😀"
        assert [token for choice in choices for token in choice["token_ids"]] == list(ids)
        assert not any("usage" in part for part in parts)


async def test_stream_that_ends_inside_a_utf8_character() -> None:
    async with running_frontend(text=hello_tokenizer()) as front:
        ids = byte_tokens("😀".encode()[:3])
        front.backend.script = token_script(*ids)
        *parts, _ = await stream_chunks(front, prompt=[1])
        texts = [part["choices"][0]["text"] for part in parts]
        assert texts == ["", "", "", "\ufffd", ""]
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 4 + ["length"]


async def test_usage_of_a_stream_comes_last_and_is_null_before() -> None:
    async with running_frontend() as front:
        *parts, end = await stream_chunks(
            front, prompt=[1, 2], max_tokens=2, stream_options={"include_usage": True}
        )
        assert end == "[DONE]"
        assert [part["usage"] for part in parts[:-1]] == [None, None, None]
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["total_tokens"] == 4
        assert parts[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_http_and_grpc_submit_and_answer_the_same() -> None:
    sampling: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "seed": -3,
        "min_tokens": 2,
    }
    sampling |= {"ignore_eos": True, "stop_token_ids": [5, 6]}
    async with running_frontend(text=hello_tokenizer()) as front:
        ids = await hello_tokenizer().encode("hello")
        front.backend.script = token_script(*ids, reason=FinishReason.STOP)
        over_http = await front.http.post(
            "/v1/completions", json={"prompt": "hello hello", "return_token_ids": True, **sampling}
        )
        once = await front.stub.GenerateOnce(pb.GenerateRequest(text="hello hello", **sampling))
        stream = [
            part
            async for part in front.stub.Generate(
                pb.GenerateRequest(text="hello hello", **sampling)
            )
        ]

        first, *others = front.backend.requests
        assert first.sampling.seed == -3
        assert all(
            (other.prompt_token_ids, other.sampling) == (first.prompt_token_ids, first.sampling)
            for other in others
        )
        choice = over_http.json()["choices"][0]
        assert (
            (choice["text"], choice["token_ids"])
            == (once.text, list(once.token_ids))
            == ("hello", list(ids))
        )
        assert "".join(part.text for part in stream) == "hello"
        assert [token for part in stream for token in part.token_ids] == list(ids)
        assert stream[-1].finish_reason == once.finish_reason == common_pb2.FINISH_REASON_STOP
        assert stream[-1].usage == once.usage
        assert once.usage.cached_tokens == 2
        assert once.timeline.attempts == stream[-1].timeline.attempts == 1
        assert {part.request_id for part in stream} == {stream[0].request_id}


async def test_default_sampling_parameters() -> None:
    async with running_frontend() as front:
        for _ in range(2):
            await front.http.post(
                "/v1/completions", json={"prompt": [1] * (MODEL_BOUNDS.max_context - 5)}
            )
        once = await front.stub.GenerateOnce(pb.GenerateRequest(token_ids={"ids": [1]}))
        short, again, other = (request.sampling for request in front.backend.requests)
        assert short.max_tokens == 5  # what the context leaves of 16
        assert other.max_tokens == len(once.token_ids) == 16
        assert (other.temperature, other.top_k, other.top_p, other.min_tokens) == (1.0, 0, 1.0, 0)
        assert not other.ignore_eos
        assert len({short.seed, again.seed, other.seed}) == 3


async def test_generation_config_defaults() -> None:
    """Of its generation_config.json, for what a request does not say."""
    own = GenerationDefaults((), 0.6, 5000, 0.95, 0.1, 1.1, max_new_tokens=7)
    async with running_frontend(text=chat_tokenizer(), defaults=own) as front:
        talk = [{"role": "user", "content": "hello"}]
        await front.http.post("/v1/completions", json={"prompt": [1]})
        await front.http.post("/v1/chat/completions", json={"messages": talk})
        await front.stub.GenerateOnce(pb.GenerateRequest(chat={"messages": talk}))
        said = {
            "temperature": 0,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
            "repetition_penalty": 1,
            "max_tokens": 3,
        }
        await front.http.post("/v1/chat/completions", json={"messages": talk, **said})
        plain, chat, over_grpc, told = (request.sampling for request in front.backend.requests)
        for sampling in (plain, chat, over_grpc):
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == (
                0.6,
                MODEL_BOUNDS.vocab_size,
                0.95,
            )
            assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
        assert (plain.max_tokens, chat.max_tokens, over_grpc.max_tokens) == (16, 7, 7)
        assert {field: getattr(told, field) for field in said} == said


async def test_request_ids_are_returned_and_client_ids_echoed() -> None:
    async with running_frontend() as front:
        response = await front.http.post(
            "/v1/completions", json={"prompt": [1]}, headers={"x-request-id": "order 66"}
        )
        assert response.headers["x-request-id"] == "order 66"
        assert len(response.headers["x-baton-request-id"]) == 32
        refused = await front.http.post(
            "/v1/completions", json={}, headers={"x-request-id": "order 67"}
        )
        assert refused.headers["x-request-id"] == "order 67"
        bad = await front.http.post(
            "/v1/completions", json={"prompt": [1]}, headers={"x-request-id": "x" * 129}
        )
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-id")
        call = front.stub.GenerateOnce(
            pb.GenerateRequest(token_ids={"ids": [1]}), metadata=(("x-request-id", "order 68"),)
        )
        initial = dict(await call.initial_metadata())
        answer = await call
        assert initial["x-request-id"] == "order 68"
        assert initial["x-baton-request-id"] == answer.request_id


async def test_models_lists_the_served_model() -> None:
    async with running_frontend() as front:
        models = (await front.http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [
            ("demo", MODEL_BOUNDS.max_context)
        ]
        listed = await front.stub.ListModels(pb.ListModelsRequest())
        assert [(model.id, model.max_model_len) for model in listed.models] == [
            ("demo", MODEL_BOUNDS.max_context)
        ]
        for told in (
            models["data"][0],
            {field.name: value for field, value in listed.models[0].ListFields()},
        ):
            assert (told["model_digest"], told["dtype"], told["quantization"]) == (
                "ab12",
                "float32",
                "fp8",
            )
