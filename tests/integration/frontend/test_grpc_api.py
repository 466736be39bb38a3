"""What only gRPC has: its own words for conversations and tokens, bytes that are no message, and
reflection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.network.health_service import MAX_STREAMS_PER_CONNECTION
from baton.pb import generation_pb2 as pb
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
    FrontendHarness,
    await_grpc_error,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import chat_tokenizer, expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT_MESSAGES = {"messages": [{"role": "user", "content": "hello", "name": "Ann"}]}
RENDERED = "<user>Ann: hello"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    async with running_frontend(text=chat_tokenizer()) as running:
        yield running


async def test_chat_messages_over_grpc(front: FrontendHarness) -> None:
    front.backend.script = lambda generation: generation.emit_events(finished_event())
    await front.stub.GenerateOnce(pb.GenerateRequest(chat=CHAT_MESSAGES))
    await front.stub.GenerateOnce(
        pb.GenerateRequest(chat=CHAT_MESSAGES | {"add_generation_prompt": False}, max_tokens=3)
    )
    first, second = front.backend.requests
    assert (first.prompt_token_ids, second.prompt_token_ids) == (
        expected_ids(f"{RENDERED}<assistant>"),
        expected_ids(RENDERED),
    )
    assert first.sampling.max_tokens == MODEL_BOUNDS.max_context - len(first.prompt_token_ids)
    assert second.sampling.max_tokens == 3


async def test_tokenize_and_detokenize_over_grpc(front: FrontendHarness) -> None:
    text = await front.stub.Tokenize(pb.TokenizeRequest(text="héllo", return_token_strings=True))
    assert tuple(text.token_ids) == expected_ids("héllo")
    assert len(text.token_strings) == len(text.token_ids)
    assert text.max_model_len == MODEL_BOUNDS.max_context
    chat = await front.stub.Tokenize(pb.TokenizeRequest(chat=CHAT_MESSAGES))
    assert tuple(chat.token_ids) == expected_ids(f"{RENDERED}<assistant>")
    back = await front.stub.Detokenize(pb.DetokenizeRequest(token_ids=text.token_ids))
    assert back.text == "héllo"


BAD: list[tuple[str, Any, str, str]] = [
    ("GenerateOnce", pb.GenerateRequest(chat={}), "messages", "messages has 0 messages"),
    (
        "GenerateOnce",
        pb.GenerateRequest(chat={"messages": [{"role": "king"}]}),
        "messages",
        "messages[0].role is 'king'",
    ),
    (
        "GenerateOnce",
        pb.GenerateRequest(chat={"messages": [{"role": "tool"}]}),
        "messages",
        "no tools here",
    ),
    (
        "GenerateOnce",
        pb.GenerateRequest(prompts={}),
        "prompt",
        "a list of 0 prompts: it must be 1 to 128",
    ),
    (
        "GenerateOnce",
        pb.GenerateRequest(prompts={"prompts": [{"text": "x"}, {}]}),
        "prompt",
        "prompt[1] is missing",
    ),
    ("GenerateOnce", pb.GenerateRequest(text="x", n=0), "n", "n is 0: it must be 1 to 16"),
    ("GenerateOnce", pb.GenerateRequest(text="x", n=17), "n", "n is 17"),
    ("GenerateOnce", pb.GenerateRequest(text="x", stop=[""]), "stop", "0 characters"),
    ("GenerateOnce", pb.GenerateRequest(text="x", logprobs=21), "logprobs", "logprobs is 21"),
    (
        "GenerateOnce",
        pb.GenerateRequest(text="x", presence_penalty=float("nan")),
        "presence_penalty",
        "is nan",
    ),
    (
        "GenerateOnce",
        pb.GenerateRequest(text="x", logit_bias={5: 200.0}),
        "logit_bias",
        "logit_bias is 200.0",
    ),
    (
        "GenerateOnce",
        pb.GenerateRequest(text="x", logit_bias={5000: 1.0}),
        "logit_bias",
        "logit_bias has 5000",
    ),
    ("Tokenize", pb.TokenizeRequest(), "prompt", "give prompt or messages"),
    (
        "Detokenize",
        pb.DetokenizeRequest(token_ids=[MODEL_BOUNDS.vocab_size]),
        "tokens",
        "tokens has 1000",
    ),
]


@pytest.mark.parametrize(
    ("method", "request_", "param", "told"), BAD, ids=lambda value: str(value)[:40]
)
async def test_bad_grpc_requests_are_refused(
    front: FrontendHarness, method: str, request_: Any, param: str, told: str
) -> None:
    error = await await_grpc_error(getattr(front.stub, method)(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["baton-error-param"] == param
    assert told in error.details()


@pytest.mark.parametrize(
    "method", ["Generate", "GenerateOnce", "Tokenize", "Detokenize", "ListModels"]
)
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\xff", b"\x0a\x02\xff\xfe"])
async def test_malformed_protobuf_is_refused(
    front: FrontendHarness, method: str, data: bytes
) -> None:
    if method == "ListModels":
        data = b"\xff\xff\xff"  # it has no fields that could be wrong
    make = front.channel.unary_stream if method == "Generate" else front.channel.unary_unary
    error = await await_grpc_error(make(f"/baton.v1.Generation/{method}")(data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "its bytes cannot be read" in (error.details() or "")


async def test_unknown_field_in_a_nested_message_is_refused(front: FrontendHarness) -> None:
    chat = pb.Conversation(
        messages=[
            pb.Message.FromString(pb.Message(role="user").SerializeToString() + b"\x98\x06\x05")
        ]
    )
    error = await await_grpc_error(front.stub.GenerateOnce(pb.GenerateRequest(chat=chat)))
    assert "field number 99 is not a field of Message" in (error.details() or "")


async def test_unknown_field_inside_a_map(front: FrontendHarness) -> None:
    value = pb.TemplateValue.FromString(b"\x98\x06\x05")
    chat = pb.Conversation(messages=[pb.Message(role="user")], chat_template_kwargs={"a": value})
    error = await await_grpc_error(front.stub.GenerateOnce(pb.GenerateRequest(chat=chat)))
    assert "field number 99 is not a field of TemplateValue" in (error.details() or "")


async def test_grpc_reflection_describes_the_service(front: FrontendHarness) -> None:
    """A client without our .proto files learns what there is and what it takes."""
    stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)

    async def ask(**what: str) -> Any:
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**what)]))
        async for answer in call:
            return answer

    listed = (await ask(list_services="")).list_services_response.service
    assert "baton.v1.Generation" in {service.name for service in listed}
    described = (await ask(file_containing_symbol="baton.v1.Generation")).file_descriptor_response
    files = [FileDescriptorProto.FromString(data) for data in described.file_descriptor_proto]
    services = {service.name: service for file in files for service in file.service}
    methods = [method.name for method in services["Generation"].method]
    assert methods == ["Generate", "GenerateOnce", "Tokenize", "Detokenize", "ListModels"]
    messages = {message.name: message for file in files for message in file.message_type}
    assert {"text", "chat", "logprobs"} <= {
        field.name for field in messages["GenerateRequest"].field
    }


async def test_unauthenticated_streams_are_bounded(front: FrontendHarness) -> None:
    watched = health_pb2_grpc.HealthStub(front.channel)
    request = health_pb2.HealthCheckRequest()
    calls = [watched.Watch(request, timeout=60) for _ in range(MAX_STREAMS_PER_CONNECTION)]
    await asyncio.gather(*(call.read() for call in calls))
    reflection = reflection_pb2_grpc.ServerReflectionStub(front.channel)
    for call in (
        watched.Watch(health_pb2.HealthCheckRequest(), timeout=60),
        reflection.ServerReflectionInfo(timeout=60),
    ):
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
