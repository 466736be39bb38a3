"""Answers as /v1/chat/completions words them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from coordinator.answer import Answer
from coordinator.http.chat_schema import ChatRequest
from coordinator.http.chunks import Chunks, encode
from coordinator.http.completion_shape import LOWEST
from coordinator.http.usage import Usage, usage_of
from coordinator.telling import Piece
from coordinator.tokenizer import Text

_ROLE = b'"delta":{"role":"assistant","content":""}'
_NO_LOGPROBS = b"null"


class TopLogprob(msgspec.Struct):
    """`bytes` are those of the token's text, null if it has none."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
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
class _Told:
    """One choice of an answer that is told as a whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


class ChatShape:
    def __init__(self, request: ChatRequest, answer: Answer) -> None:
        self._answer = answer
        self._token_ids = bool(request.return_token_ids)
        self._scored = bool(request.logprobs)
        self._id = f"chatcmpl-{answer.id}"
        self._chunks = Chunks(answer, request, id=self._id, object="chat.completion.chunk")
        self._told = [_Told() for _ in answer.choices]
        self._begun: set[int] = set()

    def chunk(self, piece: Piece) -> bytes:
        """The first of a choice comes after the event that gives its role."""
        logprobs = _NO_LOGPROBS
        if self._scored and piece.tokens:
            logprobs = encode(ChatLogprobs(list(_logprobs(self._answer.text, piece))))
        delta = b'"delta":{}' if piece.finish is not None else b'"delta":{"content":%b}' % encode(piece.text)
        event = self._chunks.event(piece, delta, logprobs)
        if piece.index in self._begun:
            return event
        self._begun.add(piece.index)
        role = self._chunks.event(Piece(piece.index, ""), _ROLE, _NO_LOGPROBS, untold=len(piece.tokens))
        return role + event

    def last(self) -> bytes:
        return self._chunks.last()

    def add(self, piece: Piece) -> None:
        told = self._told[piece.index]
        told.texts.append(piece.text)
        told.tokens.extend(piece.tokens)
        if self._scored:
            told.logprobs.extend(_logprobs(self._answer.text, piece))
        if piece.finish is not None:
            told.finish = piece.finish.value

    def whole(self) -> bytes:
        answer = self._answer
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage("assistant", "".join(told.texts)),
                logprobs=ChatLogprobs(told.logprobs) if self._scored else None,
                finish_reason=told.finish,
                token_ids=told.tokens if self._token_ids else msgspec.UNSET,
            )
            for index, told in enumerate(self._told)
        ]
        return encode(
            ChatCompletion(self._id, "chat.completion", answer.created, answer.model, choices, usage_of(answer))
        )


def _logprobs(text: Text, piece: Piece) -> Iterable[TokenLogprob]:
    for token, score in zip(piece.tokens, piece.scores, strict=True):
        if score is not None:
            top = [_named(text, candidate, logprob) for candidate, logprob in score.top]
            own = _named(text, token, score.logprob)
            yield TokenLogprob(own.token, own.logprob, own.bytes, top)


def _named(text: Text, token: int, logprob: float) -> TopLogprob:
    data = text.token_bytes(token)
    return TopLogprob(text.token_text(token), max(logprob, LOWEST), None if data is None else list(data))
