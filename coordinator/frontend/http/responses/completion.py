"""Formats responses of /v1/completions."""

from dataclasses import dataclass, field

import msgspec

from baton.errors import BatonError
from baton.types import TokenLogprobs
from coordinator.frontend.http.responses.prompt_logprobs import (
    MIN_LOGPROB,
    PromptLogprobs,
    PromptLogprobsBuffer,
)
from coordinator.frontend.http.responses.sse import SseEncoder, encode_error_event, encode_json
from coordinator.frontend.http.responses.usage import Usage, final_usage
from coordinator.frontend.http.schema.generation_requests import CompletionRequest
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.text.tokenizer import Tokenizer


class TopToken(msgspec.Struct):
    """One of the likeliest tokens in a place."""

    token_id: int
    token: str
    logprob: float


class CompletionLogprobs(msgspec.Struct):
    """One entry for each token; the first of a prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    # If token ids are requested: of `tokens`, and the likeliest tokens in each place, best first.
    # `top_logprobs` has one entry for all tokens of the same text.
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[TopToken] | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@dataclass(slots=True)
class _CompletionChoiceBuffer:
    """The output of one choice, for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET


class CompletionFormatter:
    """Formats one response, streamed or not."""

    def __init__(self, request: CompletionRequest, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._returns_token_ids = bool(request.return_token_ids)
        self._has_logprobs = request.logprobs is not None
        self._id = f"cmpl-{stream.id}"
        self._sse_encoder = SseEncoder(stream, request, id=self._id, object="text_completion")
        self._choice_buffers = [_CompletionChoiceBuffer() for _ in stream.choices]
        self._prompt_logprobs = PromptLogprobsBuffer(stream)

    def format_chunk(self, chunk: OutputChunk) -> bytes:
        logprobs = (
            encode_json(self._format_logprobs(chunk))
            if self._has_logprobs and chunk.token_ids
            else b"null"
        )
        return self._sse_encoder.encode_event(chunk, b'"text":' + encode_json(chunk.text), logprobs)

    def format_stream_end(self) -> bytes:
        return self._sse_encoder.encode_stream_end()

    def format_error(self, error: BatonError, body: bytes) -> bytes:
        return encode_error_event(body)

    def add_chunk(self, chunk: OutputChunk) -> None:
        if chunk.prompt_logprobs:
            self._prompt_logprobs.add_chunk(chunk)
            return
        buffer = self._choice_buffers[chunk.choice_index]
        buffer.texts.append(chunk.text)
        if not chunk.is_prompt_echo:
            buffer.tokens.extend(chunk.token_ids)
        if self._has_logprobs:
            logprobs = self._format_logprobs(chunk)
            buffer.logprobs = _concatenate_logprobs(buffer.logprobs, logprobs)
        if chunk.finish_reason is not None:
            buffer.finish_reason = chunk.finish_reason.value
        if chunk.stop_reason is not None:
            buffer.stop_reason = chunk.stop_reason

    def format_body(self) -> bytes:
        stream = self._response_stream
        choices = [
            CompletionChoice(
                index=index,
                text="".join(buffer.texts),
                logprobs=buffer.logprobs,
                finish_reason=buffer.finish_reason,
                stop_reason=buffer.stop_reason,
                token_ids=buffer.tokens if self._returns_token_ids else msgspec.UNSET,
                prompt_token_ids=(
                    stream.get_prompt_token_ids(index) if self._returns_token_ids else msgspec.UNSET
                ),
                prompt_logprobs=self._prompt_logprobs.get_prompt_logprobs(index),
            )
            for index, buffer in enumerate(self._choice_buffers)
        ]
        return encode_json(
            Completion(
                self._id,
                "text_completion",
                stream.created_unix_seconds,
                stream.model,
                choices,
                final_usage(stream),
            )
        )

    def _format_logprobs(self, chunk: OutputChunk) -> CompletionLogprobs:
        logprobs = _chunk_logprobs(self._response_stream.tokenizer, chunk)
        if self._returns_token_ids:
            logprobs.token_ids = list(chunk.token_ids)
            logprobs.top_tokens = [
                _list_top_tokens(self._response_stream.tokenizer, score) for score in chunk.logprobs
            ]
        return logprobs


def _chunk_logprobs(tokenizer: Tokenizer, chunk: OutputChunk) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token) for token in chunk.token_ids],
        token_logprobs=[
            None if score is None else max(score.logprob, MIN_LOGPROB) for score in chunk.logprobs
        ],
        top_logprobs=[
            _top_logprobs(tokenizer, token, score)
            for token, score in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ],
        text_offset=list(chunk.text_offsets),
    )


def _top_logprobs(
    tokenizer: Tokenizer, token: int, score: TokenLogprobs | None
) -> dict[str, float] | None:
    """Return the most likely tokens, best first, and the token itself."""
    if score is None:
        return None
    top: dict[str, float] = {}
    for candidate, logprob in (*score.top_logprobs, (token, score.logprob)):
        top.setdefault(tokenizer.token_text(candidate), max(logprob, MIN_LOGPROB))
    return top


def _list_top_tokens(tokenizer: Tokenizer, score: TokenLogprobs | None) -> list[TopToken] | None:
    if score is None:
        return None
    return [
        TopToken(candidate, tokenizer.token_text(candidate), max(logprob, MIN_LOGPROB))
        for candidate, logprob in score.top_logprobs
    ]


def _concatenate_logprobs(
    before: CompletionLogprobs | None, more: CompletionLogprobs
) -> CompletionLogprobs:
    if before is None:
        return more
    before.tokens += more.tokens
    before.token_logprobs += more.token_logprobs
    before.top_logprobs += more.top_logprobs
    before.text_offset += more.text_offset
    if isinstance(before.token_ids, list) and isinstance(more.token_ids, list):
        before.token_ids += more.token_ids
    if isinstance(before.top_tokens, list) and isinstance(more.top_tokens, list):
        before.top_tokens += more.top_tokens
    return before
