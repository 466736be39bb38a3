"""One request's events on their way to its reader."""

import asyncio
from collections.abc import Coroutine

import pytest

from baton.errors import NodeLost, SlowReader
from baton.types import FinishReason, RequestId
from coordinator.core.common.timeline import Timeline
from coordinator.generation import FinishedEvent, GenerationEvent, TokensEvent
from coordinator.node_links.dispatcher import MAX_UNREAD_TOKENS, GenerationStream

LINE = Timeline(total=3.0, attempts=8)


class StoppingReader:
    """Reads a stream, and wants no more once it has had `enough` events."""

    def __init__(self, enough: int | None = None) -> None:
        self.callbacks: list[str] = []
        self.events: list[GenerationEvent] = []
        self.stream = GenerationStream(
            RequestId("r"),
            lambda _: self.callbacks.append("cancel"),
            lambda _: self.callbacks.append("stop"),
        )
        self._stop_after_events = enough

    async def read_all(self) -> None:
        async for event in self.stream:
            self.events.append(event)
            if len(self.events) == self._stop_after_events:
                self.stream.stop()


def run_coroutine(part: Coroutine[None, None, None]) -> None:
    asyncio.run(part)


def test_events_before_an_error_are_read_first() -> None:
    reader = StoppingReader()
    reader.stream.push_tokens(TokensEvent((1, 2)))
    reader.stream.end_stream(NodeLost("dead"), LINE)
    with pytest.raises(NodeLost):
        run_coroutine(reader.read_all())
    assert reader.events == [TokensEvent((1, 2))]
    assert reader.callbacks == []


def test_error_after_the_stop_point_is_not_raised() -> None:
    """A stop text was complete in what it had not read yet when the last attempt failed."""
    reader = StoppingReader(enough=1)
    reader.stream.push_tokens(TokensEvent((1, 2)))
    reader.stream.push_tokens(TokensEvent((3,)))
    reader.stream.end_stream(SlowReader("too slow"), LINE)
    run_coroutine(reader.read_all())
    assert reader.events == [
        TokensEvent((1, 2)),
        TokensEvent((3,)),
        FinishedEvent(FinishReason.STOP, 0, LINE),
    ]
    assert reader.callbacks == []


def test_stream_ends_once_even_if_stopped_after_its_end() -> None:
    reader = StoppingReader(enough=1)
    reader.stream.push_tokens(TokensEvent((1,)))
    reader.stream.end_stream(FinishedEvent(FinishReason.LENGTH, 5, LINE), LINE)
    reader.stream.stop()
    run_coroutine(reader.read_all())
    assert reader.events == [TokensEvent((1,)), FinishedEvent(FinishReason.LENGTH, 5, LINE)]


def test_unread_tokens_are_bounded() -> None:
    reader = StoppingReader()
    assert reader.stream.push_tokens(TokensEvent((0,) * MAX_UNREAD_TOKENS))
    assert not reader.stream.push_tokens(TokensEvent((1,)))
