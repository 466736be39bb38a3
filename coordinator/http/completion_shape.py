"""Answers as /v1/completions words them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.types import TokenScore
from coordinator.answer import Answer
from coordinator.http.chunks import Chunks, encode
from coordinator.http.completion_schema import CompletionRequest
from coordinator.http.usage import Usage, usage_of
from coordinator.telling import Piece
from coordinator.tokenizer import Text

LOWEST = -9999.0  # what stands for the logarithm of zero, which JSON has no number for


class Logprobs(msgspec.Struct):
    """One entry for each token; the first of a prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | None
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
class _Told:
    """One choice of an answer that is told as a whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish: str | None = None


class CompletionShape:
    def __init__(self, request: CompletionRequest, answer: Answer) -> None:
        self._answer = answer
        self._token_ids = bool(request.return_token_ids)
        self._scored = request.logprobs is not None
        self._id = f"cmpl-{answer.id}"
        self._chunks = Chunks(answer, request, id=self._id, object="text_completion")
        self._told = [_Told() for _ in answer.choices]

    def chunk(self, piece: Piece) -> bytes:
        logprobs = encode(_logprobs(self._answer.text, piece)) if self._scored and piece.tokens else b"null"
        return self._chunks.event(piece, b'"text":' + encode(piece.text), logprobs)

    def last(self) -> bytes:
        return self._chunks.last()

    def add(self, piece: Piece) -> None:
        told = self._told[piece.index]
        told.texts.append(piece.text)
        if not piece.echo:
            told.tokens.extend(piece.tokens)
        if self._scored:
            told.logprobs = _joined(told.logprobs, _logprobs(self._answer.text, piece))
        if piece.finish is not None:
            told.finish = piece.finish.value

    def whole(self) -> bytes:
        answer = self._answer
        choices = [
            CompletionChoice(
                index=index,
                text="".join(told.texts),
                logprobs=told.logprobs,
                finish_reason=told.finish,
                token_ids=told.tokens if self._token_ids else msgspec.UNSET,
            )
            for index, told in enumerate(self._told)
        ]
        return encode(Completion(self._id, "text_completion", answer.created, answer.model, choices, usage_of(answer)))


def _logprobs(text: Text, piece: Piece) -> Logprobs:
    return Logprobs(
        tokens=[text.token_text(token) for token in piece.tokens],
        token_logprobs=[None if score is None else max(score.logprob, LOWEST) for score in piece.scores],
        top_logprobs=[_top(text, token, score) for token, score in zip(piece.tokens, piece.scores, strict=True)],
        text_offset=list(piece.starts),
    )


def _top(text: Text, token: int, score: TokenScore | None) -> dict[str, float] | None:
    """The most likely tokens, the best first, and the token itself."""
    if score is None:
        return None
    ranked: Sequence[tuple[int, float]] = (*score.top, (token, score.logprob))
    top: dict[str, float] = {}
    for candidate, logprob in ranked:
        top.setdefault(text.token_text(candidate), max(logprob, LOWEST))
    return top


def _joined(before: Logprobs | None, more: Logprobs) -> Logprobs:
    if before is None:
        return more
    before.tokens += more.tokens
    before.token_logprobs += more.token_logprobs
    before.top_logprobs += more.top_logprobs
    before.text_offset += more.text_offset
    return before
