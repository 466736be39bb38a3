"""Which files and functions count as on the path of a request."""

from typing import Any

from tools.request_trace import FORWARD, find_on_path

SENT = [1.0, 2.0]  # seconds
PROCESSES: list[dict[str, Any]] = [
    {"module": "coordinator", "times": {"a.py::f": [1.1, 2.6], "a.py::g": [2.1], "b.py::f": [1.2]}},
    {"module": "prefill_node", "times": {"c.py::f": [1.3, 2.3], FORWARD: [1.5, 2.5]}},
    {"module": "decode_node", "times": {"d.py::f": [1.6, 2.6]}},
]


def test_file_is_on_path_if_any_of_its_functions_ran_before_each_forward() -> None:
    assert find_on_path(SENT, PROCESSES) == {"coordinator": {"a.py"}, "prefill_node": {"c.py"}}


def test_function_is_on_path_if_it_ran_before_each_forward() -> None:
    assert find_on_path(SENT, PROCESSES, functions=True) == {"prefill_node": {"c.py::f"}}
