"""Converts output chunks to responses of baton.v1.Generation."""

from baton.cluster_link import pb_conversion
from baton.pb import generation_pb2 as pb
from coordinator.explanation_codec import timeline_to_pb
from coordinator.frontend.output import OutputChunk, ResponseStream


class GrpcResponseFormatter:
    """Formats the output of one call, streamed or in one message."""

    def __init__(self, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._unfinished_choices = len(stream.choices)
        self._choice_responses = [
            pb.GenerateResponse(request_id=stream.id, choice=index)
            for index in range(self._unfinished_choices)
        ]
        self._text_parts: list[list[str]] = [[] for _ in stream.choices]
        self._prompt_parts: list[list[str]] = [[] for _ in stream.choices]

    def format_chunk(self, chunk: OutputChunk) -> pb.GenerateResponse:
        """Return the message of a stream for a chunk."""
        response = pb.GenerateResponse(
            request_id=self._response_stream.id, choice=chunk.choice_index
        )
        scores = [
            pb_conversion.logprobs_to_pb(logprobs)
            for logprobs in chunk.logprobs
            if logprobs is not None
        ]
        if chunk.is_prompt_echo:
            response.prompt.CopyFrom(
                pb.Echo(text=chunk.text, token_ids=chunk.token_ids, scores=scores)
            )
            return response
        response.prompt_scores.extend(
            pb_conversion.logprobs_to_pb(logprobs)
            for logprobs in chunk.prompt_logprobs
            if logprobs is not None
        )
        response.text = chunk.text
        response.token_ids.extend(chunk.token_ids)
        response.scores.extend(scores)
        if chunk.finish_reason is not None:
            response.finish_reason = pb_conversion.FINISH_REASON_TO_PB[chunk.finish_reason]
            self._unfinished_choices -= 1
            if not self._unfinished_choices:
                self._fill_usage(response)
        return response

    def add_chunk(self, chunk: OutputChunk) -> None:
        """Add a chunk to the one message of an unary call."""
        part = self.format_chunk(chunk)
        if chunk.is_prompt_echo:
            self._prompt_parts[chunk.choice_index].append(part.prompt.text)
            part.prompt.ClearField("text")
        self._text_parts[chunk.choice_index].append(part.text)
        part.ClearField("text")
        part.ClearField("usage")
        part.ClearField("timeline")
        self._choice_responses[chunk.choice_index].MergeFrom(part)

    def format_response(self) -> pb.GenerateResponse:
        for response, texts, prompts in zip(
            self._choice_responses, self._text_parts, self._prompt_parts, strict=True
        ):
            response.text = "".join(texts)
            if prompts:
                response.prompt.text = "".join(prompts)
        first, *others = self._choice_responses
        first.others.extend(others)
        self._fill_usage(first)
        return first

    def _fill_usage(self, response: pb.GenerateResponse) -> None:
        stream = self._response_stream
        response.usage.prompt_tokens = stream.prompt_tokens
        response.usage.completion_tokens = stream.completion_tokens
        response.usage.cached_tokens = stream.cached_tokens
        response.timeline.CopyFrom(timeline_to_pb(stream.timeline))
