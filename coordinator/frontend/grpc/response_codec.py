"""Pieces of an answer as messages of baton.v1.Generation."""

from baton.cluster_link import pb_conversion
from baton.pb import generation_pb2 as pb
from coordinator.frontend.output import OutputChunk
from coordinator.frontend.response_stream import ResponseStream


class GrpcResponseFormatter:
    """Of one call."""

    def __init__(self, answer: ResponseStream) -> None:
        self._response_stream = answer
        self._unfinished_choices = len(answer.choices)
        self._choice_responses = [
            pb.GenerateResponse(request_id=answer.id, choice=index)
            for index in range(self._unfinished_choices)
        ]
        self._text_parts: list[list[str]] = [[] for _ in answer.choices]
        self._prompt_parts: list[list[str]] = [[] for _ in answer.choices]

    def format_chunk(self, piece: OutputChunk) -> pb.GenerateResponse:
        """A message of a stream."""
        response = pb.GenerateResponse(
            request_id=self._response_stream.id, choice=piece.choice_index
        )
        scores = [
            pb_conversion.logprobs_to_pb(score) for score in piece.logprobs if score is not None
        ]
        if piece.is_prompt_echo:
            response.prompt.CopyFrom(
                pb.Echo(text=piece.text, token_ids=piece.token_ids, scores=scores)
            )
            return response
        response.text = piece.text
        response.token_ids.extend(piece.token_ids)
        response.scores.extend(scores)
        if piece.finish_reason is not None:
            response.finish_reason = pb_conversion.FINISH_REASON_TO_PB[piece.finish_reason]
            self._unfinished_choices -= 1
            if not self._unfinished_choices:
                self._fill_usage(response)
        return response

    def add_chunk(self, piece: OutputChunk) -> None:
        """A piece of an answer that is one message."""
        part = self.format_chunk(piece)
        if piece.is_prompt_echo:
            self._prompt_parts[piece.choice_index].append(part.prompt.text)
            part.prompt.ClearField("text")
        self._text_parts[piece.choice_index].append(part.text)
        part.ClearField("text")
        part.ClearField("usage")
        part.ClearField("timeline")
        self._choice_responses[piece.choice_index].MergeFrom(part)

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
        answer = self._response_stream
        response.usage.prompt_tokens = answer.prompt_tokens
        response.usage.completion_tokens = answer.completion_tokens
        response.usage.cached_tokens = answer.cached_tokens
        response.timeline.CopyFrom(answer.timeline)
