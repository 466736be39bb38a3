"""Encodes server-sent events. The constant parts of a stream are encoded once."""

import msgspec

from coordinator.frontend.http.responses.usage import final_usage, partial_usage
from coordinator.frontend.http.schema.generation_requests import CommonRequestBody
from coordinator.frontend.output import OutputChunk, ResponseStream

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode


class SseEncoder:
    """Encodes the events of one stream, `{head, "choices": [{"index": i, ...}]}`.

    If usage is requested, it is null up to the last event, which has no choices. With
    `continuous_usage_stats`, every event has the usage so far.
    """

    def __init__(
        self, stream: ResponseStream, request: CommonRequestBody, *, id: str, object: str
    ) -> None:
        head = {
            "id": id,
            "object": object,
            "created": stream.created_unix_seconds,
            "model": stream.model,
        }
        self._response_stream = stream
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._event_heads = [
            self._head + b'{"index":%d,' % index for index in range(len(stream.choices))
        ]
        self._event_tail = b'}],"usage":null}\n\n' if request.include_usage else b"}]}\n\n"
        self._unfinished_tail = b',"finish_reason":null' + self._event_tail
        self._includes_usage = request.include_usage
        self._has_continuous_usage = request.has_continuous_usage
        self._returns_token_ids = bool(request.return_token_ids)

    def encode_event(
        self, chunk: OutputChunk, content: bytes, logprobs: bytes, *, pending_tokens: int = 0
    ) -> bytes:
        """Return the event of a chunk.

        `content` is the encoded member with the choice's text, as `"text":"..."`, and `logprobs`
        the encoded value of that member. `pending_tokens` tokens of the chunk come in a later
        event and are left out of the usage.
        """
        opened = self._event_heads[chunk.choice_index]
        if (
            chunk.finish_reason is None
            and not self._returns_token_ids
            and not self._has_continuous_usage
        ):
            return b'%b%b,"logprobs":%b%b' % (opened, content, logprobs, self._unfinished_tail)
        reason = (
            b"null" if chunk.finish_reason is None else b'"%b"' % chunk.finish_reason.value.encode()
        )
        tokens = (
            b',"token_ids":' + encode_json([] if chunk.is_prompt_echo else chunk.token_ids)
            if self._returns_token_ids
            else b""
        )
        closed = self._event_tail
        if self._has_continuous_usage:
            closed = b'}],"usage":%b}\n\n' % encode_json(
                partial_usage(self._response_stream, pending_tokens)
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
