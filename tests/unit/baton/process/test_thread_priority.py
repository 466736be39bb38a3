"""Threads of low priority, also in processes that have a low priority themselves."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.process.thread_priority import lower_thread_priority


def get_niceness_on_thread(before: int) -> int:
    """The niceness of a thread that began with `before` and then lowered its priority."""

    def run() -> int:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, before)
        lower_thread_priority()
        return os.getpriority(os.PRIO_PROCESS, thread)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


@pytest.mark.parametrize("before", [10, 15, 19])
def test_a_thread_of_lower_priority_keeps_it(before: int) -> None:
    before = max(before, os.getpriority(os.PRIO_PROCESS, 0))  # which these tests may not raise
    assert get_niceness_on_thread(before) == before


def test_a_thread_gets_a_low_priority_and_others_keep_theirs() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert get_niceness_on_thread(own) == max(own, 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_thread_that_may_not_lower_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    lower_thread_priority()
