"""What one client's bodies may cost: bounds are checked before the work, and the work is off the
event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx2
import pytest

from baton.limits import (
    MAX_BODY_BYTES,
    MAX_CHAT_MESSAGES,
    MAX_GRPC_BODIES_PER_CONNECTION,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_PROMPTS,
    MAX_SMALL_BODY_BYTES,
    MAX_TOKENIZE_TOKENS,
)
from baton.pb import generation_pb2 as pb
from coordinator.frontend import body_budget
from coordinator.frontend.http import request_handling as request_body
from coordinator.frontend.http.server import bounded_protocol
from coordinator.text.tokenizer import BoundedEncoder
from tests.integration.frontend.frontend_harness import (
    COMPLETIONS_HEAD,
    MODEL_BOUNDS,
    FrontendHarness,
    await_grpc_error,
    running_frontend,
)
from tests.small_tokenizers import byte_level_tokenizer, chat_tokenizer, hello_tokenizer

GOOD = {"prompt": [1, 2], "max_tokens": 2}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "text/json", "application/jsonx", ""],
)
async def test_body_without_json_content_type_is_refused(path: str, kind: str) -> None:
    """A web page of anywhere may send any other body without being asked for leave. vLLM refuses
    them too."""
    async with (
        running_frontend() as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}") as client,
    ):
        answer = await client.post(
            path, content=json.dumps(GOOD), headers={"content-type": kind} if kind else {}
        )
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"
        assert (kind or "missing") in answer.json()["error"]["message"]
        assert front.backend.requests == []


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x=y"]
)
async def test_content_type_parameters_are_ignored(kind: str) -> None:
    async with running_frontend() as front:
        answer = await front.http.post("/v1/completions", json=GOOD, headers={"content-type": kind})
        assert answer.status_code == 200


async def test_admin_port_refuses_non_json_bodies() -> None:
    async with running_frontend() as front:
        answer = await front.admin.post(
            "/admin/drain", content=b'{"node": "d0"}', headers={"content-type": "text/plain"}
        )
        assert answer.status_code == 415
        assert front.backend.drain_calls == []


async def open_half_sent_body(
    front: FrontendHarness, size: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
    writer.write(COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n{" % size + b" " * (size - 2))
    await writer.drain()
    return reader, writer


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0)


async def test_half_sent_bodies_are_bounded_and_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_CONCURRENT_LARGE_BODY_BYTES", 10 * MAX_SMALL_BODY_BYTES)
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 600.0)
    async with running_frontend() as front:
        large = front.body_budgets.get_budget(None)
        held = [await open_half_sent_body(front, 3 * MAX_SMALL_BODY_BYTES) for _ in range(3)]
        await wait_until(lambda: large.used_bytes == 9 * MAX_SMALL_BODY_BYTES - 3)
        body = json.dumps(GOOD).encode()
        padded = body + b" " * (2 * MAX_SMALL_BODY_BYTES)
        refused = await front.http.post("/v1/completions", content=padded)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert (
            await front.http.post("/v1/completions", content=body)
        ).status_code == 200  # small ones have room
        assert large.used_bytes == 9 * MAX_SMALL_BODY_BYTES - 3
        monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 0.0)
        assert (await front.http.post("/v1/completions", content=padded)).status_code == 200
        async with asyncio.timeout(60):
            answer = await held[0][0].read()  # to the end: it is not held open
        assert b" 429 " in answer
        assert b"still arriving" in answer
        for _, writer in held:
            writer.close()
        await wait_until(lambda: len(large) == 0)
        assert large.used_bytes == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_are_charged_for_received_bytes_only(
    monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    """Also where nothing gives way: 40 clients that only say that they send 4 MiB keep no other
    out."""
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 600.0)
    padded = json.dumps(GOOD).encode() + b" " * (2 * MAX_SMALL_BODY_BYTES)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(padded), 10_000):
            yield padded[start : start + 10_000]

    async with running_frontend() as front:
        large, held = front.body_budgets.get_budget(None), []
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
            writer.write(COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n{" % MAX_BODY_BYTES)
            held.append((reader, writer))
        await wait_until(lambda: len(large) == 40)
        answer = await front.http.post("/v1/completions", content=chunks() if chunked else padded)
        assert answer.status_code == 200, answer.text
        for _, writer in held:
            writer.close()


async def test_incomplete_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_SECONDS", 0.05)
    async with running_frontend() as front:
        reader, writer = await open_half_sent_body(front, 100)
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert b" 504 " in answer
        assert b"did not arrive within 0.05 s" in answer
        writer.close()


async def test_unread_body_of_a_refused_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused by its head, and its client goes on sending, or does not."""
    monkeypatch.setattr(bounded_protocol, "BODY_CLOSE_SECONDS", 0.05)
    async with running_frontend(api_key="secret") as front:
        reader, writer = await open_half_sent_body(front, 100)
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert b" 401 " in answer
        writer.close()


async def test_incomplete_grpc_request_is_displaced_and_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_CONCURRENT_GRPC_BODIES", 1)
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 600.0)
    async with running_frontend() as front:
        room, good = (
            front.body_budgets.grpc_budget,
            pb.GenerateRequest(token_ids={"ids": [1]}, max_tokens=1),
        )
        open_call = front.channel.stream_stream("/baton.v1.Generation/Generate")()
        await wait_until(lambda: len(room) == 1)
        error = await await_grpc_error(front.stub.GenerateOnce(good))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after"] == "1"
        monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 0.0)
        assert len((await front.stub.GenerateOnce(good)).token_ids) == 1
        async with asyncio.timeout(60):
            assert await open_call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(room) == 0


_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def test_silent_calls_on_one_connection_do_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nothing gives way and everybody waits for ever."""
    for name in ("MAX_WAIT_SECONDS", "STALL_SECONDS", "DISPLACE_SECONDS"):
        monkeypatch.setattr(body_budget, name, 600.0)
    async with running_frontend() as front:
        room, good = (
            front.body_budgets.grpc_budget,
            pb.GenerateRequest(token_ids={"ids": [1]}, max_tokens=1),
        )
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{front.grpc_port}", options=_OWN_CONNECTION
        ) as channel:
            silent = [
                channel.stream_unary("/baton.v1.Generation/GenerateOnce")() for _ in range(200)
            ]
            await wait_until(lambda: len(room) == MAX_GRPC_BODIES_PER_CONNECTION)
            assert len((await front.stub.GenerateOnce(good, timeout=60)).token_ids) == 1
            assert len(room) == MAX_GRPC_BODIES_PER_CONNECTION
            for call in silent:
                call.cancel()
        await wait_until(lambda: len(room) == 0)


async def test_silent_calls_without_a_key_hold_no_budget() -> None:
    async with running_frontend(api_key="secret") as front:
        for method in ("Generate", "GenerateOnce", "Tokenize", "Detokenize", "ListModels"):
            call = front.channel.stream_stream(f"/baton.v1.Generation/{method}")()
            async with asyncio.timeout(60):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert len(front.body_budgets.grpc_budget) == 0
        assert front.refused_codes == ["invalid_api_key"] * 5


OVERSIZED_MESSAGES = {
    "prompts": (
        pb.GenerateRequest(prompts={"prompts": [{}] * (MAX_PROMPTS + 1)}),
        f"{MAX_PROMPTS + 1} prompts",
    ),
    "very many prompts": (
        pb.GenerateRequest(prompts={"prompts": [{}] * 100_000}),
        "more than 8192 fields",
    ),
    "messages": (
        pb.GenerateRequest(chat={"messages": [{}] * (MAX_CHAT_MESSAGES + 1)}),
        f"{MAX_CHAT_MESSAGES + 1} messages",
    ),
    "very many messages": (
        pb.GenerateRequest(chat={"messages": [{}] * 100_000}),
        "more than 8192 fields",
    ),
    "biases": (
        pb.GenerateRequest(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 1.0)),
        "1025 entries",
    ),
    "very many biases": (
        pb.GenerateRequest(logit_bias=dict.fromkeys(range(200_000), 1.0)),
        "more than 8192 fields",
    ),
    "stop strings": (pb.GenerateRequest(stop=["a"] * 17), "17 strings: at most 16"),
}


@pytest.mark.parametrize("many", OVERSIZED_MESSAGES)
async def test_grpc_repeated_fields_are_bounded_before_they_are_read(
    many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, told = OVERSIZED_MESSAGES[many]
    async with running_frontend() as front:
        error = await await_grpc_error(front.stub.GenerateOnce(message))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert told in error.details()


async def test_many_unknown_grpc_fields_are_refused_unread() -> None:
    async with running_frontend() as front:
        call = front.channel.unary_unary("/baton.v1.Generation/GenerateOnce")
        error = await await_grpc_error(call(b"\xf8\x3f\x01" * 5000))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "15000 bytes are of fields that GenerateRequest does not have" in error.details()
        error = await await_grpc_error(call(b"\xf8\x3f\x01"))
        assert "field number 1023 is not a field of GenerateRequest" in error.details()


async def test_too_long_text_is_refused_before_tokenization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []
    encode = BoundedEncoder.encode_text

    def noted(self: Any, text: str, *more: Any, **others: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, *more, **others)

    monkeypatch.setattr(BoundedEncoder, "encode_text", noted)
    longest = max(map(len, byte_level_tokenizer().get_vocab()))
    text = "x" * (MODEL_BOUNDS.max_context * longest)
    async with running_frontend(text=hello_tokenizer()) as front:
        answers = [await front.http.post("/v1/completions", json={"prompt": text})]
        answers.append(await front.http.post("/v1/completions", json={"prompt": ["a", text]}))
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                400,
                "context_length_exceeded",
            )
            assert f"{len(text)} bytes of text" in answer.json()["error"]["message"]
            assert "--max-model-len" in answer.json()["error"]["message"]
        assert answers[1].json()["error"]["message"].startswith("prompt[1] has")
        error = await await_grpc_error(front.stub.GenerateOnce(pb.GenerateRequest(text=text)))
        assert dict(error.trailing_metadata())["baton-error-code"] == "context_length_exceeded"
        assert encoded == [1]


async def test_too_long_conversation_is_refused_before_tokenization() -> None:
    longest = max(map(len, byte_level_tokenizer().get_vocab()))
    messages = [{"role": "user", "content": "x" * (MODEL_BOUNDS.max_context * longest)}]
    async with running_frontend(text=chat_tokenizer()) as front:
        answer = await front.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["message"].startswith("messages has")


async def test_detokenize_bounds_the_number_of_tokens() -> None:
    async with running_frontend(text=hello_tokenizer()) as front:
        answer = await front.http.post(
            "/detokenize", json={"tokens": [70] * (MAX_TOKENIZE_TOKENS + 1)}
        )
        assert answer.status_code == 400
        assert (
            f"tokens has {MAX_TOKENIZE_TOKENS + 1} tokens: the limit is {MAX_TOKENIZE_TOKENS}"
            in answer.text
        )
        answer = await front.http.post("/detokenize", json={"tokens": [70] * 5000})
        assert len(answer.json()["prompt"]) >= 5000
