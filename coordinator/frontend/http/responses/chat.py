"""Formats responses of /v1/chat/completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from baton.errors import BatonError
from baton.types import FinishReason
from coordinator.frontend.http.responses.chat_message import (
    EMPTY_DELTA,
    ChatMessage,
    build_message,
    encode_deltas,
)
from coordinator.frontend.http.responses.parsed_choice import (
    MessageCollector,
    ParsedChoice,
    finish_reason_text,
)
from coordinator.frontend.http.responses.prompt_logprobs import (
    MIN_LOGPROB,
    PromptLogprobs,
    PromptLogprobsBuffer,
)
from coordinator.frontend.http.responses.sse import SseEncoder, encode_error_event, encode_json
from coordinator.frontend.http.responses.usage import Usage, final_usage
from coordinator.frontend.http.schema.generation_requests import ChatRequest
from coordinator.frontend.http.schema.tools import NamedToolChoiceParam
from coordinator.frontend.output import OutputChunk, ResponseStream

_ROLE_DELTA = b'"delta":{"role":"assistant","content":""}'
_NO_LOGPROBS = b"null"


class ChatTopLogprob(msgspec.Struct):
    """A token and its logprob; `bytes` are those of its text, null if it has none."""

    token: str
    logprob: float
    bytes: list[int] | None
    token_id: int | msgspec.UnsetType = msgspec.UNSET


class ChatTokenLogprob(ChatTopLogprob, kw_only=True):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True)
class _ChatChoiceBuffer:
    """The output of one choice, for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    parsed: MessageCollector | None = None  # in the place of `texts`


class ChatFormatter:
    """Formats one response, streamed or not."""

    def __init__(self, request: ChatRequest, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._returns_token_ids = bool(request.return_token_ids)
        self._has_logprobs = bool(request.logprobs)
        self._id = f"chatcmpl-{stream.id}"
        self._sse_encoder = SseEncoder(stream, request, id=self._id, object="chat.completion.chunk")
        self._choice_buffers = [_ChatChoiceBuffer() for _ in stream.choices]
        self._prompt_logprobs = PromptLogprobsBuffer(stream)
        self._started_choices: set[int] = set()
        self._includes_reasoning = request.include_reasoning is not False
        self._has_named_call = isinstance(request.tool_choice, NamedToolChoiceParam)
        self._parsed_choices: list[ParsedChoice] = []
        if stream.parsing is not None:
            self._parsed_choices = [
                ParsedChoice(stream, index) for index in range(len(stream.choices))
            ]
            for buffer, parsed in zip(self._choice_buffers, self._parsed_choices, strict=True):
                buffer.parsed = MessageCollector(parsed)

    def format_chunk(self, chunk: OutputChunk) -> bytes:
        """Return the events of a chunk; before the first of a choice, an event gives its role."""
        event = self._format_parsed(chunk) if self._parsed_choices else self._format_text(chunk)
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

    def _format_text(self, chunk: OutputChunk) -> bytes:
        """Return the event of a chunk that is all content."""
        delta = (
            b'"delta":{}'
            if chunk.finish_reason is not None
            else b'"delta":{"content":%b}' % encode_json(chunk.text)
        )
        return self._sse_encoder.encode_event(chunk, delta, self._encode_logprobs(chunk))

    def _format_parsed(self, chunk: OutputChunk) -> bytes:
        """Return the event of what a chunk adds, and before the last event what was held back."""
        parsed = self._parsed_choices[chunk.choice_index]
        delta = encode_deltas(parsed, chunk, includes_reasoning=self._includes_reasoning)
        reason = chunk.finish_reason
        if reason is None:
            is_empty = delta == EMPTY_DELTA
            if is_empty and not (self._has_logprobs or self._returns_token_ids):
                return b""
            logprobs = self._encode_logprobs(chunk)
            return self._sse_encoder.encode_event(chunk, b'"delta":' + delta, logprobs)
        rest = b""
        if delta != EMPTY_DELTA:
            rest = self._sse_encoder.encode_event(
                OutputChunk(chunk.choice_index, ""), b'"delta":' + delta, _NO_LOGPROBS
            )
        return rest + self._sse_encoder.encode_event(
            chunk,
            b'"delta":{}',
            self._encode_logprobs(chunk),
            finish_reason=finish_reason_text(
                reason, has_calls=parsed.has_calls, is_named=self._has_named_call
            ),
        )

    def _encode_logprobs(self, chunk: OutputChunk) -> bytes:
        if not (self._has_logprobs and chunk.token_ids):
            return _NO_LOGPROBS
        return encode_json(ChatLogprobs(list(self._format_logprobs(chunk))))

    def format_stream_end(self) -> bytes:
        return self._sse_encoder.encode_stream_end()

    def format_error(self, error: BatonError, body: bytes) -> bytes:
        return encode_error_event(body)

    def add_chunk(self, chunk: OutputChunk) -> None:
        if chunk.prompt_logprobs:
            self._prompt_logprobs.add_chunk(chunk)
            return
        buffer = self._choice_buffers[chunk.choice_index]
        if buffer.parsed is None:
            buffer.texts.append(chunk.text)
        else:
            buffer.parsed.add_chunk(chunk)
        buffer.tokens.extend(chunk.token_ids)
        if self._has_logprobs:
            buffer.logprobs.extend(self._format_logprobs(chunk))
        if chunk.finish_reason is not None:
            buffer.finish_reason = chunk.finish_reason
        if chunk.stop_reason is not None:
            buffer.stop_reason = chunk.stop_reason

    def format_body(self) -> bytes:
        stream = self._response_stream
        choices = [
            self._build_choice(index, buffer) for index, buffer in enumerate(self._choice_buffers)
        ]
        return encode_json(
            ChatCompletion(
                self._id,
                "chat.completion",
                stream.created_unix_seconds,
                stream.model,
                choices,
                final_usage(stream),
                stream.get_prompt_token_ids(0) if self._returns_token_ids else msgspec.UNSET,
                self._prompt_logprobs.get_prompt_logprobs(0),
            )
        )

    def _build_choice(self, index: int, buffer: _ChatChoiceBuffer) -> ChatChoice:
        assert buffer.finish_reason is not None
        if buffer.parsed is None:
            message = ChatMessage("assistant", "".join(buffer.texts))
            reason = buffer.finish_reason.value
        else:
            parsed = buffer.parsed.collect_message()
            message = build_message(parsed, includes_reasoning=self._includes_reasoning)
            reason = finish_reason_text(
                buffer.finish_reason, has_calls=bool(parsed.calls), is_named=self._has_named_call
            )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=ChatLogprobs(buffer.logprobs) if self._has_logprobs else None,
            finish_reason=reason,
            stop_reason=buffer.stop_reason,
            token_ids=buffer.tokens if self._returns_token_ids else msgspec.UNSET,
        )

    def _format_logprobs(self, chunk: OutputChunk) -> Iterable[ChatTokenLogprob]:
        for token, score in zip(chunk.token_ids, chunk.logprobs, strict=True):
            if score is not None:
                top = [
                    self._format_candidate(candidate, logprob)
                    for candidate, logprob in score.top_logprobs
                ]
                own = self._format_candidate(token, score.logprob)
                yield ChatTokenLogprob(
                    own.token, own.logprob, own.bytes, own.token_id, top_logprobs=top
                )

    def _format_candidate(self, token: int, logprob: float) -> ChatTopLogprob:
        tokenizer = self._response_stream.tokenizer
        data = tokenizer.token_bytes(token)
        return ChatTopLogprob(
            tokenizer.token_text(token),
            max(logprob, MIN_LOGPROB),
            None if data is None else list(data),
            token if self._returns_token_ids else msgspec.UNSET,
        )
