"""Pieces of an answer as messages of baton.v1.Generation."""

from baton import wire
from baton.pb import generation_pb2 as pb
from coordinator.answer import Answer
from coordinator.telling import Piece


class Responses:
    """Of one call."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._unfinished = len(answer.choices)
        self._whole = [pb.GenerateResponse(request_id=answer.id, choice=index) for index in range(self._unfinished)]
        self._texts: list[list[str]] = [[] for _ in answer.choices]
        self._prompts: list[list[str]] = [[] for _ in answer.choices]

    def one(self, piece: Piece) -> pb.GenerateResponse:
        """A message of a stream."""
        response = pb.GenerateResponse(request_id=self._answer.id, choice=piece.index)
        scores = [wire.score_to_pb(score) for score in piece.scores if score is not None]
        if piece.echo:
            response.prompt.CopyFrom(pb.Echo(text=piece.text, token_ids=piece.tokens, scores=scores))
            return response
        response.text = piece.text
        response.token_ids.extend(piece.tokens)
        response.scores.extend(scores)
        if piece.finish is not None:
            response.finish_reason = wire.FINISH_TO_PB[piece.finish]
            self._unfinished -= 1
            if not self._unfinished:
                self._account(response)
        return response

    def add(self, piece: Piece) -> None:
        """A piece of an answer that is one message."""
        part = self.one(piece)
        if piece.echo:
            self._prompts[piece.index].append(part.prompt.text)
            part.prompt.ClearField("text")
        self._texts[piece.index].append(part.text)
        part.ClearField("text")
        part.ClearField("usage")
        part.ClearField("timeline")
        self._whole[piece.index].MergeFrom(part)

    def whole(self) -> pb.GenerateResponse:
        for response, texts, prompts in zip(self._whole, self._texts, self._prompts, strict=True):
            response.text = "".join(texts)
            if prompts:
                response.prompt.text = "".join(prompts)
        first, *others = self._whole
        first.others.extend(others)
        self._account(first)
        return first

    def _account(self, response: pb.GenerateResponse) -> None:
        answer = self._answer
        response.usage.prompt_tokens = answer.prompt_tokens
        response.usage.completion_tokens = answer.completion_tokens
        response.usage.cached_tokens = answer.cached_tokens
        response.timeline.CopyFrom(answer.timeline)
