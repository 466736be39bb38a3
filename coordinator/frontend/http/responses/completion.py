"""Formats responses of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.types import TokenLogprobs
from coordinator.frontend.http.responses.sse import SseEncoder, encode_json
from coordinator.frontend.http.responses.usage import Usage, final_usage
from coordinator.frontend.http.schema.generation_requests import CompletionRequest
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for the logarithm of zero, which JSON cannot represent


class CompletionLogprobs(msgspec.Struct):
    """One entry for each token; the first of a prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


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


class CompletionFormatter:
    """Formats one response, streamed or not."""

    def __init__(self, request: CompletionRequest, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._returns_token_ids = bool(request.return_token_ids)
        self._has_logprobs = request.logprobs is not None
        self._id = f"cmpl-{stream.id}"
        self._sse_encoder = SseEncoder(stream, request, id=self._id, object="text_completion")
        self._choice_buffers = [_CompletionChoiceBuffer() for _ in stream.choices]

    def format_chunk(self, chunk: OutputChunk) -> bytes:
        logprobs = (
            encode_json(_chunk_logprobs(self._response_stream.tokenizer, chunk))
            if self._has_logprobs and chunk.token_ids
            else b"null"
        )
        return self._sse_encoder.encode_event(chunk, b'"text":' + encode_json(chunk.text), logprobs)

    def format_stream_end(self) -> bytes:
        return self._sse_encoder.encode_usage_event()

    def add_chunk(self, chunk: OutputChunk) -> None:
        buffer = self._choice_buffers[chunk.choice_index]
        buffer.texts.append(chunk.text)
        if not chunk.is_prompt_echo:
            buffer.tokens.extend(chunk.token_ids)
        if self._has_logprobs:
            buffer.logprobs = _concatenate_logprobs(
                buffer.logprobs, _chunk_logprobs(self._response_stream.tokenizer, chunk)
            )
        if chunk.finish_reason is not None:
            buffer.finish_reason = chunk.finish_reason.value

    def format_body(self) -> bytes:
        stream = self._response_stream
        choices = [
            CompletionChoice(
                index=index,
                text="".join(buffer.texts),
                logprobs=buffer.logprobs,
                finish_reason=buffer.finish_reason,
                token_ids=buffer.tokens if self._returns_token_ids else msgspec.UNSET,
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
    ranked: Sequence[tuple[int, float]] = (*score.top_logprobs, (token, score.logprob))
    top: dict[str, float] = {}
    for candidate, logprob in ranked:
        top.setdefault(tokenizer.token_text(candidate), max(logprob, MIN_LOGPROB))
    return top


def _concatenate_logprobs(
    before: CompletionLogprobs | None, more: CompletionLogprobs
) -> CompletionLogprobs:
    if before is None:
        return more
    before.tokens += more.tokens
    before.token_logprobs += more.token_logprobs
    before.top_logprobs += more.top_logprobs
    before.text_offset += more.text_offset
    return before
