"""An event loop on a thread of its own: work that is interrupted, or comes at the end."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from offline.event_loop_thread import EventLoopThread


def test_no_work_is_accepted_once_the_end_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that was handed over behind the end would never be run, and its caller would wait."""
    thread, busy = EventLoopThread("test"), threading.Event()
    thread._loop.call_soon_threadsafe(busy.wait)
    join = thread._thread.join

    def call_before_join() -> None:
        try:
            with pytest.raises(RuntimeError, match="the event loop is closed"):
                thread.call(asyncio.sleep(0))
        finally:
            busy.set()
            join()

    monkeypatch.setattr(thread._thread, "join", call_before_join)
    thread.close()
    assert busy.is_set()


class InterruptedFuture(Future[None]):
    """What a thread waits for when Ctrl-C comes."""

    def result(self, timeout: float | None = None) -> None:
        raise KeyboardInterrupt


def test_work_that_has_not_begun_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is busy when Ctrl-C comes."""
    monkeypatch.setattr("offline.event_loop_thread.Future", InterruptedFuture)
    busy = threading.Event()
    with EventLoopThread("test") as thread:
        thread._loop.call_soon_threadsafe(busy.wait)
        threading.Timer(0.1, busy.set).start()
        with pytest.raises(KeyboardInterrupt):
            thread.call(asyncio.sleep(60.0))


def test_work_that_was_not_handed_over_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLoopThread("test") as thread:
        hand_over, calls = thread._loop.call_soon_threadsafe, iter(range(2))

        def interrupt_first(*arguments: Any) -> Any:
            if next(calls, 1) == 0:
                raise KeyboardInterrupt
            return hand_over(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(thread._loop, "call_soon_threadsafe", interrupt_first)
            with pytest.raises(KeyboardInterrupt):
                thread.call(asyncio.sleep(60.0))
