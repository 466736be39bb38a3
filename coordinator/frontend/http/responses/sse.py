"""Encodes server-sent events. The constant parts of a stream are encoded once."""

import msgspec

from coordinator.frontend.http.responses.usage import final_usage, partial_usage
from coordinator.frontend.http.schema.generation_requests import CommonRequestBody
from coordinator.frontend.output import OutputChunk, ResponseStream

_encoder = msgspec.json.Encoder()
encode_json = _encoder.encode
_DONE = b"data: [DONE]\n\n"


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
        # A conversation has one prompt, whose tokens are told once beside the choices.
        self._prompt_is_in_choice = object == "text_completion"
        self._sent_prompts: set[int] = set()

    def encode_event(
        self,
        chunk: OutputChunk,
        content: bytes,
        logprobs: bytes,
        *,
        pending_tokens: int = 0,
        finish_reason: str | None = None,
    ) -> bytes:
        """Return the event of a chunk.

        `content` is the encoded member with the choice's text, as `"text":"..."`, and `logprobs`
        the encoded value of that member. `pending_tokens` tokens of the chunk come in a later
        event and are left out of the usage. `finish_reason` replaces that of the last chunk.
        """
        opened = self._event_heads[chunk.choice_index]
        if (
            chunk.finish_reason is None
            and not self._returns_token_ids
            and not self._has_continuous_usage
        ):
            return b'%b%b,"logprobs":%b%b' % (opened, content, logprobs, self._unfinished_tail)
        reason = (
            b"null"
            if chunk.finish_reason is None
            else encode_json(finish_reason or chunk.finish_reason.value)
        )
        if chunk.stop_reason is not None:
            reason += b',"stop_reason":' + encode_json(chunk.stop_reason)
        in_choice, beside_choices = self._encode_token_ids(chunk)
        closed = self._event_tail
        if self._has_continuous_usage:
            closed = b'}],"usage":%b}\n\n' % encode_json(
                partial_usage(self._response_stream, pending_tokens)
            )
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}]%b%b' % (
            opened,
            content,
            logprobs,
            reason,
            in_choice,
            beside_choices,
            closed.removeprefix(b"}]"),
        )

    def _encode_token_ids(self, chunk: OutputChunk) -> tuple[bytes, bytes]:
        """Return the members of the choice, and those beside the choices, with token ids."""
        if not self._returns_token_ids:
            return b"", b""
        tokens = b',"token_ids":' + encode_json([] if chunk.is_prompt_echo else chunk.token_ids)
        prompt = self._encode_prompt_once(chunk.choice_index)
        return (tokens + prompt, b"") if self._prompt_is_in_choice else (tokens, prompt)

    def _encode_prompt_once(self, choice_index: int) -> bytes:
        """Return the member with the prompt's tokens for the first event that has to have it."""
        key = choice_index if self._prompt_is_in_choice else 0
        if key in self._sent_prompts:
            return b""
        self._sent_prompts.add(key)
        prompt = self._response_stream.get_prompt_token_ids(choice_index)
        return b',"prompt_token_ids":' + encode_json(prompt)

    def encode_stream_end(self) -> bytes:
        """Return the event with the usage, if it is requested, and the end mark."""
        if not self._includes_usage:
            return _DONE
        usage = encode_json(final_usage(self._response_stream))
        return self._head + b'],"usage":' + usage + b"}\n\n" + _DONE


def encode_error_event(error_body: bytes) -> bytes:
    """Return the event of an error that is encoded already."""
    return b"data: " + error_body + b"\n\n"
