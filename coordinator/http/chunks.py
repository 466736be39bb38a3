"""Server-sent events built from what is constant in a stream and what is not: a token costs one small encoding."""

import msgspec

from coordinator.answer import Answer
from coordinator.http.usage import usage_of
from coordinator.telling import Piece

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class Chunks:
    """Of one stream. An event is `{head, "choices": [{"index": i, ...}]}`, and `usage` where it is asked for: null
    until the last event, which has no choices."""

    def __init__(self, answer: Answer, *, id: str, object: str, usage: bool, token_ids: bool) -> None:
        head = {"id": id, "object": object, "created": answer.created, "model": answer.model}
        self._answer = answer
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._opened = [self._head + b'{"index":%d,' % index for index in range(len(answer.choices))]
        self._closed = b'}],"usage":null}\n\n' if usage else b"}]}\n\n"
        self._unfinished = b',"finish_reason":null' + self._closed
        self._usage = usage
        self._token_ids = token_ids

    def event(self, piece: Piece, content: bytes, logprobs: bytes) -> bytes:
        """`content` is the choice's own member, as `"text":"..."`; `logprobs` the value of that one."""
        opened = self._opened[piece.index]
        if piece.finish is None and not self._token_ids:
            return b'%b%b,"logprobs":%b%b' % (opened, content, logprobs, self._unfinished)
        reason = b"null" if piece.finish is None else b'"%b"' % piece.finish.value.encode()
        tokens = b',"token_ids":' + encode([] if piece.echo else piece.tokens) if self._token_ids else b""
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b%b' % (opened, content, logprobs, reason, tokens, self._closed)

    def last(self) -> bytes:
        return self._head + b'],"usage":' + encode(usage_of(self._answer)) + b"}\n\n" if self._usage else b""
