"""The window of recent latencies."""

from coordinator.operators.latency_window import MAX_REQUESTS, WINDOW_SECONDS, LatencyWindow


def test_percentiles_cover_only_the_window() -> None:
    recent = LatencyWindow()
    assert (recent.compute_latency(0.0).requests, recent.compute_latency(0.0).ttft_p90) == (0, 0.0)
    for number in range(10):
        recent.add_request(float(number), number / 10, None if number % 2 else 0.01)
    found = recent.compute_latency(9.0)
    assert (found.requests, found.ttft_p50, found.ttft_p90, found.tpot_p50) == (10, 0.5, 0.9, 0.01)
    assert recent.compute_latency(WINDOW_SECONDS + 4.0).requests == 5
    assert recent.compute_latency(2 * WINDOW_SECONDS).requests == 0


def test_window_is_bounded_in_count() -> None:
    recent = LatencyWindow()
    for _ in range(MAX_REQUESTS + 5):
        recent.add_request(1.0, 1.0, 1.0)
    assert recent.compute_latency(1.0).requests == MAX_REQUESTS
