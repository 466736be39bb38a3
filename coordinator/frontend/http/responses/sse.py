"""Server-sent events built from what is constant in a stream and what is not: a token costs one
small encoding."""

import msgspec

from coordinator.frontend.http.responses.usage import final_usage, partial_usage
from coordinator.frontend.http.schema.common_fields import CommonRequestBody
from coordinator.frontend.output import OutputChunk
from coordinator.frontend.response_stream import ResponseStream

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode


class SseEncoder:
    """Of one stream. An event is `{head, "choices": [{"index": i, ...}]}`, and `usage` where it is
    asked for: null until the last event, which has no choices, or with `continuous_usage_stats`
    what the answer has used so far."""

    def __init__(
        self, answer: ResponseStream, request: CommonRequestBody, *, id: str, object: str
    ) -> None:
        head = {
            "id": id,
            "object": object,
            "created": answer.created_unix_seconds,
            "model": answer.model,
        }
        self._response_stream = answer
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._event_heads = [
            self._head + b'{"index":%d,' % index for index in range(len(answer.choices))
        ]
        self._event_tail = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._unfinished_tail = b',"finish_reason":null' + self._event_tail
        self._includes_usage = request.include_usage
        self._has_continuous_usage = request.has_continuous_usage
        self._returns_token_ids = bool(request.return_token_ids)

    def encode_event(
        self, piece: OutputChunk, content: bytes, logprobs: bytes, *, untold: int = 0
    ) -> bytes:
        """`content` is the choice's own member, as `"text":"..."`; `logprobs` the value of that
        one. `untold` tokens of the answer come in a later event."""
        opened = self._event_heads[piece.choice_index]
        if (
            piece.finish_reason is None
            and not self._returns_token_ids
            and not self._has_continuous_usage
        ):
            return b'%b%b,"logprobs":%b%b' % (opened, content, logprobs, self._unfinished_tail)
        reason = (
            b"null" if piece.finish_reason is None else b'"%b"' % piece.finish_reason.value.encode()
        )
        tokens = (
            b',"token_ids":' + encode_json([] if piece.is_prompt_echo else piece.token_ids)
            if self._returns_token_ids
            else b""
        )
        closed = self._event_tail
        if self._has_continuous_usage:
            closed = b'}],"usage":%b}\n\n' % encode_json(
                partial_usage(self._response_stream, untold)
            )
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            opened,
            content,
            logprobs,
            reason,
            tokens,
            closed,
        )

    def encode_usage_event(self) -> bytes:
        return (
            self._head + b'],"usage":' + encode_json(final_usage(self._response_stream)) + b"}\n\n"
            if self._includes_usage
            else b""
        )
