"""Server-sent events built from what is constant in a stream and what is not: a token costs one small encoding."""

import msgspec

from coordinator.answer import Answer
from coordinator.http.fields import Shared
from coordinator.http.usage import usage_of, usage_so_far
from coordinator.telling import Piece

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class Chunks:
    """Of one stream. An event is `{head, "choices": [{"index": i, ...}]}`, and `usage` where it is asked for: null
    until the last event, which has no choices, or with `continuous_usage_stats` what the answer has used so far."""

    def __init__(self, answer: Answer, request: Shared, *, id: str, object: str) -> None:
        head = {"id": id, "object": object, "created": answer.created, "model": answer.model}
        self._answer = answer
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._opened = [self._head + b'{"index":%d,' % index for index in range(len(answer.choices))]
        self._closed = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._unfinished = b',"finish_reason":null' + self._closed
        self._usage = request.include_usage
        self._continuous = request.continuous_usage
        self._token_ids = bool(request.return_token_ids)

    def event(self, piece: Piece, content: bytes, logprobs: bytes, *, untold: int = 0) -> bytes:
        """`content` is the choice's own member, as `"text":"..."`; `logprobs` the value of that one. `untold` tokens of
        the answer come in a later event."""
        opened = self._opened[piece.index]
        if piece.finish is None and not self._token_ids and not self._continuous:
            return b'%b%b,"logprobs":%b%b' % (opened, content, logprobs, self._unfinished)
        reason = b"null" if piece.finish is None else b'"%b"' % piece.finish.value.encode()
        tokens = b',"token_ids":' + encode([] if piece.echo else piece.tokens) if self._token_ids else b""
        closed = self._closed
        if self._continuous:
            closed = b'}],"usage":%b}\n\n' % encode(usage_so_far(self._answer, untold))
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b%b' % (opened, content, logprobs, reason, tokens, closed)

    def last(self) -> bytes:
        return self._head + b'],"usage":' + encode(usage_of(self._answer)) + b"}\n\n" if self._usage else b""
