"""The Python API with a paced engine in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offline.llm import LLM

VOCAB_SIZE = 1000


@pytest.fixture
def open_llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    opened = []

    def open_paced(**settings: Any) -> LLM:
        opened.append(make_paced_llm(tmp_path, **settings))
        return opened[-1]

    yield open_paced
    for llm in opened:
        llm.close()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with make_paced_llm(tmp_path_factory.mktemp("segments")) as opened:
        yield opened


def make_paced_llm(folder: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "engine": "paced",
        "paced_vocab_size": VOCAB_SIZE,
        "paced_step_ms": 0.0,
        "paced_sequence_us": 0.0,
        "paced_prefill_us_per_token": 0.0,
        "max_num_seqs": 4,
        "max_model_len": 512,
        "kv_memory": "8MiB",
        "segment_dir": str(folder),
    }
    return LLM("paced", **{**defaults, **settings})
