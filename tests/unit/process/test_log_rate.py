import threading
from typing import Any

from baton.process.log_rate import BURST, RateLimitedLog


def test_a_flood_becomes_few_lines_and_the_next_one_says_how_many_are_missing() -> None:
    now = 0.0
    said: list[tuple[str, dict[str, Any]]] = []
    log = RateLimitedLog(lambda: now)

    def say(event: str, **fields: Any) -> None:
        said.append((event, fields))

    for _ in range(1000):
        log.write(say, "refused", per="invalid_request", code="invalid_request")
    assert said == [("refused", {"code": "invalid_request"})] * BURST
    log.write(say, "refused", per="queue_full", code="queue_full")  # another kind has an allowance of its own
    assert len(said) == BURST + 1
    now = 1.5
    for _ in range(3):
        log.write(say, "refused", per="invalid_request", code="invalid_request")
    assert said[BURST + 1 :] == [("refused", {"code": "invalid_request", "left_out": 1000 - BURST})]


def test_kinds_are_bounded_too() -> None:
    said: list[str] = []
    log = RateLimitedLog(lambda: 0.0)
    for number in range(100_000):
        log.write(said.append, f"made up {number}")
    assert len(said) < 1000
    assert len(log._kinds) < 1000


def test_threads_take_turns() -> None:
    """A bucket read by two at once admits twice what it holds, and loses what it has counted."""
    inside, overlaps = threading.Lock(), []
    met = threading.Event()

    def now() -> float:
        if not inside.acquire(blocking=False):
            overlaps.append(1)
            met.set()
            return 0.0
        met.wait(0.2)  # for another thread to come in, which none does
        inside.release()
        return 0.0

    log = RateLimitedLog(now, burst=1)
    said: list[str] = []
    threads = [threading.Thread(target=log.write, args=(said.append, "refused")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (said, overlaps) == (["refused"], [])
