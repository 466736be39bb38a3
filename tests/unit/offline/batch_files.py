"""Input files of batches, and what their outputs must be."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def request_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [1, 2, 3], "max_tokens": 3, **body},
    }


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    """Write values as JSON, and texts as they are."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_each_is_answered_once(output: Path, custom_ids: Iterable[str]) -> None:
    """Every id has one line with a whole answer, and there is no other line."""
    lines = read_lines(output)
    assert Counter(line["custom_id"] for line in lines) == Counter(custom_ids)
    for line in lines:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert len({line["id"] for line in lines}) == len(lines)
