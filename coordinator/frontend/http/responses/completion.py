"""Answers as /v1/completions words them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.types import TokenLogprobs
from coordinator.frontend.http.responses.sse import SseEncoder, encode_json
from coordinator.frontend.http.responses.usage import Usage, final_usage
from coordinator.frontend.http.schema.completion_request import CompletionRequest
from coordinator.frontend.output import OutputChunk
from coordinator.frontend.response_stream import ResponseStream
from coordinator.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # what stands for the logarithm of zero, which JSON has no number for


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
    """One choice of an answer that is told as a whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionFormatter:
    def __init__(self, request: CompletionRequest, answer: ResponseStream) -> None:
        self._response_stream = answer
        self._returns_token_ids = bool(request.return_token_ids)
        self._has_logprobs = request.logprobs is not None
        self._id = f"cmpl-{answer.id}"
        self._sse_encoder = SseEncoder(answer, request, id=self._id, object="text_completion")
        self._choice_buffers = [_CompletionChoiceBuffer() for _ in answer.choices]

    def format_chunk(self, piece: OutputChunk) -> bytes:
        logprobs = (
            encode_json(_chunk_logprobs(self._response_stream.tokenizer, piece))
            if self._has_logprobs and piece.token_ids
            else b"null"
        )
        return self._sse_encoder.encode_event(piece, b'"text":' + encode_json(piece.text), logprobs)

    def format_stream_end(self) -> bytes:
        return self._sse_encoder.encode_usage_event()

    def add_chunk(self, piece: OutputChunk) -> None:
        told = self._choice_buffers[piece.choice_index]
        told.texts.append(piece.text)
        if not piece.is_prompt_echo:
            told.tokens.extend(piece.token_ids)
        if self._has_logprobs:
            told.logprobs = _concatenate_logprobs(
                told.logprobs, _chunk_logprobs(self._response_stream.tokenizer, piece)
            )
        if piece.finish_reason is not None:
            told.finish_reason = piece.finish_reason.value

    def format_body(self) -> bytes:
        answer = self._response_stream
        choices = [
            CompletionChoice(
                index=index,
                text="".join(told.texts),
                logprobs=told.logprobs,
                finish_reason=told.finish_reason,
                token_ids=told.tokens if self._returns_token_ids else msgspec.UNSET,
            )
            for index, told in enumerate(self._choice_buffers)
        ]
        return encode_json(
            Completion(
                self._id,
                "text_completion",
                answer.created_unix_seconds,
                answer.model,
                choices,
                final_usage(answer),
            )
        )


def _chunk_logprobs(text: Tokenizer, piece: OutputChunk) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[text.token_text(token) for token in piece.token_ids],
        token_logprobs=[
            None if score is None else max(score.logprob, MIN_LOGPROB) for score in piece.logprobs
        ],
        top_logprobs=[
            _top_logprobs(text, token, score)
            for token, score in zip(piece.token_ids, piece.logprobs, strict=True)
        ],
        text_offset=list(piece.text_offsets),
    )


def _top_logprobs(
    text: Tokenizer, token: int, score: TokenLogprobs | None
) -> dict[str, float] | None:
    """The most likely tokens, the best first, and the token itself."""
    if score is None:
        return None
    ranked: Sequence[tuple[int, float]] = (*score.top_logprobs, (token, score.logprob))
    top: dict[str, float] = {}
    for candidate, logprob in ranked:
        top.setdefault(text.token_text(candidate), max(logprob, MIN_LOGPROB))
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
