"""Formats responses of /v1/chat/completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from coordinator.frontend.http.responses.completion import MIN_LOGPROB
from coordinator.frontend.http.responses.sse import SseEncoder, encode_json
from coordinator.frontend.http.responses.usage import Usage, final_usage
from coordinator.frontend.http.schema.generation_requests import ChatRequest
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.text.tokenizer import Tokenizer

_ROLE_DELTA = b'"delta":{"role":"assistant","content":""}'
_NO_LOGPROBS = b"null"


class ChatTopLogprob(msgspec.Struct):
    """A token and its logprob; `bytes` are those of its text, null if it has none."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@dataclass(slots=True)
class _ChatChoiceBuffer:
    """The output of one choice, for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class ChatFormatter:
    """Formats one response, streamed or not."""

    def __init__(self, request: ChatRequest, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._returns_token_ids = bool(request.return_token_ids)
        self._has_logprobs = bool(request.logprobs)
        self._id = f"chatcmpl-{stream.id}"
        self._sse_encoder = SseEncoder(stream, request, id=self._id, object="chat.completion.chunk")
        self._choice_buffers = [_ChatChoiceBuffer() for _ in stream.choices]
        self._started_choices: set[int] = set()

    def format_chunk(self, chunk: OutputChunk) -> bytes:
        """Return the events of a chunk; before the first of a choice, an event gives its role."""
        logprobs = _NO_LOGPROBS
        if self._has_logprobs and chunk.token_ids:
            logprobs = encode_json(
                ChatLogprobs(list(_token_logprobs(self._response_stream.tokenizer, chunk)))
            )
        delta = (
            b'"delta":{}'
            if chunk.finish_reason is not None
            else b'"delta":{"content":%b}' % encode_json(chunk.text)
        )
        event = self._sse_encoder.encode_event(chunk, delta, logprobs)
        if chunk.choice_index in self._started_choices:
            return event
        self._started_choices.add(chunk.choice_index)
        role = self._sse_encoder.encode_event(
            OutputChunk(chunk.choice_index, ""),
            _ROLE_DELTA,
            _NO_LOGPROBS,
            pending_tokens=len(chunk.token_ids),
        )
        return role + event

    def format_stream_end(self) -> bytes:
        return self._sse_encoder.encode_usage_event()

    def add_chunk(self, chunk: OutputChunk) -> None:
        buffer = self._choice_buffers[chunk.choice_index]
        buffer.texts.append(chunk.text)
        buffer.tokens.extend(chunk.token_ids)
        if self._has_logprobs:
            buffer.logprobs.extend(_token_logprobs(self._response_stream.tokenizer, chunk))
        if chunk.finish_reason is not None:
            buffer.finish_reason = chunk.finish_reason.value

    def format_body(self) -> bytes:
        stream = self._response_stream
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage("assistant", "".join(buffer.texts)),
                logprobs=ChatLogprobs(buffer.logprobs) if self._has_logprobs else None,
                finish_reason=buffer.finish_reason,
                token_ids=buffer.tokens if self._returns_token_ids else msgspec.UNSET,
            )
            for index, buffer in enumerate(self._choice_buffers)
        ]
        return encode_json(
            ChatCompletion(
                self._id,
                "chat.completion",
                stream.created_unix_seconds,
                stream.model,
                choices,
                final_usage(stream),
            )
        )


def _token_logprobs(tokenizer: Tokenizer, chunk: OutputChunk) -> Iterable[ChatTokenLogprob]:
    for token, score in zip(chunk.token_ids, chunk.logprobs, strict=True):
        if score is not None:
            top = [
                _top_logprob(tokenizer, candidate, logprob)
                for candidate, logprob in score.top_logprobs
            ]
            own = _top_logprob(tokenizer, token, score.logprob)
            yield ChatTokenLogprob(own.token, own.logprob, own.bytes, top)


def _top_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> ChatTopLogprob:
    data = tokenizer.token_bytes(token)
    return ChatTopLogprob(
        tokenizer.token_text(token), max(logprob, MIN_LOGPROB), None if data is None else list(data)
    )
