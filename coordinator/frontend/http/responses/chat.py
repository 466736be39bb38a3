"""Answers as /v1/chat/completions words them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from coordinator.frontend.http.responses.completion import MIN_LOGPROB
from coordinator.frontend.http.responses.sse import SseEncoder, encode_json
from coordinator.frontend.http.responses.usage import Usage, final_usage
from coordinator.frontend.http.schema.chat_request import ChatRequest
from coordinator.frontend.output import OutputChunk
from coordinator.frontend.response_stream import ResponseStream
from coordinator.text.tokenizer import Tokenizer

_ROLE_DELTA = b'"delta":{"role":"assistant","content":""}'
_NO_LOGPROBS = b"null"


class ChatTopLogprob(msgspec.Struct):
    """`bytes` are those of the token's text, null if it has none."""

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
    """One choice of an answer that is told as a whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class ChatFormatter:
    def __init__(self, request: ChatRequest, answer: ResponseStream) -> None:
        self._response_stream = answer
        self._returns_token_ids = bool(request.return_token_ids)
        self._has_logprobs = bool(request.logprobs)
        self._id = f"chatcmpl-{answer.id}"
        self._sse_encoder = SseEncoder(answer, request, id=self._id, object="chat.completion.chunk")
        self._choice_buffers = [_ChatChoiceBuffer() for _ in answer.choices]
        self._started_choices: set[int] = set()

    def format_chunk(self, piece: OutputChunk) -> bytes:
        """The first of a choice comes after the event that gives its role."""
        logprobs = _NO_LOGPROBS
        if self._has_logprobs and piece.token_ids:
            logprobs = encode_json(
                ChatLogprobs(list(_token_logprobs(self._response_stream.tokenizer, piece)))
            )
        delta = (
            b'"delta":{}'
            if piece.finish_reason is not None
            else b'"delta":{"content":%b}' % encode_json(piece.text)
        )
        event = self._sse_encoder.encode_event(piece, delta, logprobs)
        if piece.choice_index in self._started_choices:
            return event
        self._started_choices.add(piece.choice_index)
        role = self._sse_encoder.encode_event(
            OutputChunk(piece.choice_index, ""),
            _ROLE_DELTA,
            _NO_LOGPROBS,
            untold=len(piece.token_ids),
        )
        return role + event

    def format_stream_end(self) -> bytes:
        return self._sse_encoder.encode_usage_event()

    def add_chunk(self, piece: OutputChunk) -> None:
        told = self._choice_buffers[piece.choice_index]
        told.texts.append(piece.text)
        told.tokens.extend(piece.token_ids)
        if self._has_logprobs:
            told.logprobs.extend(_token_logprobs(self._response_stream.tokenizer, piece))
        if piece.finish_reason is not None:
            told.finish_reason = piece.finish_reason.value

    def format_body(self) -> bytes:
        answer = self._response_stream
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage("assistant", "".join(told.texts)),
                logprobs=ChatLogprobs(told.logprobs) if self._has_logprobs else None,
                finish_reason=told.finish_reason,
                token_ids=told.tokens if self._returns_token_ids else msgspec.UNSET,
            )
            for index, told in enumerate(self._choice_buffers)
        ]
        return encode_json(
            ChatCompletion(
                self._id,
                "chat.completion",
                answer.created_unix_seconds,
                answer.model,
                choices,
                final_usage(answer),
            )
        )


def _token_logprobs(text: Tokenizer, piece: OutputChunk) -> Iterable[ChatTokenLogprob]:
    for token, score in zip(piece.token_ids, piece.logprobs, strict=True):
        if score is not None:
            top = [
                _top_logprob(text, candidate, logprob) for candidate, logprob in score.top_logprobs
            ]
            own = _top_logprob(text, token, score.logprob)
            yield ChatTokenLogprob(own.token, own.logprob, own.bytes, top)


def _top_logprob(text: Tokenizer, token: int, logprob: float) -> ChatTopLogprob:
    data = text.token_bytes(token)
    return ChatTopLogprob(
        text.token_text(token), max(logprob, MIN_LOGPROB), None if data is None else list(data)
    )
