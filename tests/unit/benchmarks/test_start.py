"""The figures of a cold start, from the log lines of its processes."""

import json

import pytest

from benchmarks.start import ColdStart, make_rows, read_phases

PHASES = {
    "up": {"imports": 0.3, "preparation": 0.1},
    "coordinator": {"imports": 1.0, "settings": 0.1, "ports": 0.2},
    "prefill-0": {"imports": 1.0, "engine_imports": 1.5, "model": 0.1, "assembly": 0.1},
    "decode-0": {"imports": 1.0, "engine_imports": 1.6, "model": 0.1, "assembly": 0.2},
}


def test_phases_are_read_from_log_lines() -> None:
    lines = [
        json.dumps(
            {"event": "start-up finished", "node": name, "pid": 7}
            | {f"{phase}_seconds": seconds for phase, seconds in phases.items()}
        )
        for name, phases in PHASES.items()
    ]
    noise = ["", "not JSON", json.dumps({"event": "serving", "node": "decode-0", "x_seconds": 1.0})]
    assert read_phases([*noise, *lines, *noise]) == PHASES


def test_own_part_is_what_the_last_node_and_the_supervisor_do_beside_imports() -> None:
    start = ColdStart(3.6, 3.8, PHASES)
    assert start.last_node == "decode-0"
    assert start.imports_seconds == pytest.approx(0.3 + 1.0 + 1.6)
    rows = {row.name: row for row in make_rows(start, "some command", 5.0, 1.0)}
    assert rows["start/join_and_warm_up_request"].value == pytest.approx(3.6 - 0.4 - 2.9)
    assert rows["start/first_token"].value == 3.8
    assert rows["start/first_token"].share == pytest.approx(3.8 / 5.0)
    assert rows["start/own_part"].value == pytest.approx(0.9)
    assert rows["start/own_part"].share == pytest.approx(0.9)
    assert rows["start/decode-0/model"].note == "last node"
    assert rows["start/prefill-0/model"].note == ""
