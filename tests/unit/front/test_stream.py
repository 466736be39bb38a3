"""One request's events on their way to its reader."""

import asyncio
from collections.abc import Coroutine

import pytest

from baton.errors import NodeGone, SlowReader
from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason, RequestId
from coordinator.generation import Delta, Done, Event
from coordinator.stream import MAX_UNREAD, Stream

LINE = Timeline(total=3.0, attempts=8)


class Reader:
    """Reads a stream, and wants no more once it has had `enough` events."""

    def __init__(self, enough: int | None = None) -> None:
        self.told: list[str] = []
        self.read: list[Event] = []
        self.stream = Stream(RequestId("r"), lambda _: self.told.append("cancel"), lambda _: self.told.append("stop"))
        self._enough = enough

    async def read_all(self) -> None:
        async for event in self.stream:
            self.read.append(event)
            if len(self.read) == self._enough:
                self.stream.stop()


def run(part: Coroutine[None, None, None]) -> None:
    asyncio.run(part)


def test_what_came_before_an_error_is_read_first() -> None:
    reader = Reader()
    reader.stream.push(Delta((1, 2)))
    reader.stream.end(NodeGone("dead"), LINE)
    with pytest.raises(NodeGone):
        run(reader.read_all())
    assert reader.read == [Delta((1, 2))]
    assert reader.told == []


def test_an_error_behind_what_the_reader_wanted_is_none_to_it() -> None:
    """A stop text was complete in what it had not read yet when the last attempt failed."""
    reader = Reader(enough=1)
    reader.stream.push(Delta((1, 2)))
    reader.stream.push(Delta((3,)))
    reader.stream.end(SlowReader("too slow"), LINE)
    run(reader.read_all())
    assert reader.read == [Delta((1, 2)), Delta((3,)), Done(FinishReason.STOP, 0, LINE)]
    assert reader.told == []


def test_there_is_one_end_however_often_the_reader_has_enough() -> None:
    reader = Reader(enough=1)
    reader.stream.push(Delta((1,)))
    reader.stream.end(Done(FinishReason.LENGTH, 5, LINE), LINE)
    reader.stream.stop()
    run(reader.read_all())
    assert reader.read == [Delta((1,)), Done(FinishReason.LENGTH, 5, LINE)]


def test_what_is_unread_is_bounded() -> None:
    reader = Reader()
    assert reader.stream.push(Delta((0,) * MAX_UNREAD))
    assert not reader.stream.push(Delta((1,)))
