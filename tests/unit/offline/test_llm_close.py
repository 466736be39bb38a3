"""`LLM.close()` frees memory and ends threads at once, without Python's garbage collector."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError
from node_engine.host import draft_model
from offline.in_process import assemble
from offline.llm import LLM
from offline.outputs import PromptsFailed
from offline.sampling_params import SamplingParams
from tests.models import build_model

PARAMS = SamplingParams(temperature=0, max_tokens=4)
WITH_GRAMMAR = SamplingParams(
    temperature=0, max_tokens=4, extra_body={"structured_outputs": {"regex": "[a-z ]+"}}
)
# What holds the weights and the cache.
MAKERS = (
    (assemble, "build_engine"),
    (assemble, "create_arena"),
    (draft_model, "build_engine"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """References to the engines and arenas that are made from now on."""
    references: list[weakref.ref[Any]] = []

    def record_results(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_record(*arguments: Any, **options: Any) -> Any:
            result = make(*arguments, **options)
            references.append(weakref.ref(result))
            return result

        return make_and_record

    for module, name in MAKERS:
        monkeypatch.setattr(module, name, record_results(getattr(module, name)))
    return references


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_llm(model: Path, folder: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_memory": "16MiB",
        "threads": "2",
        "segment_dir": str(folder),
    }
    return LLM(str(model), **{**defaults, **settings})


def list_mappings(folder: Path) -> list[str]:
    """The files of a folder that this process has mapped, also those that were removed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"{folder}/" in line]


def wait_for_thread_count(most: int) -> int:
    """Wait until this process has at most `most` threads, but not for ever; returns their number.

    Linux lists a thread for a moment after it was joined, and says nothing when that has ended.
    """
    give_up_at = time.monotonic() + 10
    while (found := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < give_up_at:
        time.sleep(0.01)
    return found


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("kind", ["plain", "torch", "ngram", "draft", "grammar"])
def test_closing_frees_memory_and_threads_without_the_collector(
    kind: str, model: Path, tmp_path: Path, made: list[weakref.ref[Any]]
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "torch": {"cpu_kernels": "torch"},
        "ngram": {"speculative": "ngram"},
        "draft": {"speculative": "draft", "draft_model": str(model)},
    }
    params = WITH_GRAMMAR if kind == "grammar" else PARAMS
    frozen, threads = gc.get_freeze_count(), (0, 0)
    for number in range(3):
        llm = open_llm(model, tmp_path, **kinds.get(kind, {}))
        assert len(llm.generate(["The baton"] * 3, params, use_tqdm=False)) == 3
        assert len(made) == (3 if kind == "draft" else 2)
        assert list_mappings(tmp_path)
        llm.close()
        assert [reference() for reference in made if reference() is not None] == []
        assert list_mappings(tmp_path) == []
        if number == 0:  # libraries keep some threads, and the log its writer
            threads = len(threading.enumerate()), len(os.listdir("/proc/self/task"))
        assert len(threading.enumerate()) <= threads[0]
        assert wait_for_thread_count(threads[1]) <= threads[1]
        with pytest.raises(BatonError, match="this LLM is closed"):
            llm.generate(["The baton"], PARAMS)
        made.clear()
    assert gc.get_freeze_count() <= frozen  # fewer where frozen objects were freed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_without_collector")
def test_each_of_two_at_once_frees_what_is_its_own(
    model: Path, tmp_path: Path, made: list[weakref.ref[Any]]
) -> None:
    first = open_llm(model, tmp_path)
    count = len(made)
    second = open_llm(model, tmp_path)
    first.close()
    assert [each() is None for each in made] == [True] * count + [False] * count
    assert len(second.generate(["The baton"], PARAMS, use_tqdm=False)) == 1
    second.close()
    assert [each() for each in made if each() is not None] == []
    assert list_mappings(tmp_path) == []


@pytest.mark.usefixtures("_without_collector")
def test_errors_that_the_program_keeps_do_not_keep_the_model(
    model: Path, tmp_path: Path, made: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(model, tmp_path)
    engine = type(made[0]())

    def raise_planted_error(*arguments: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(engine, "run", raise_planted_error)
    with pytest.raises(PromptsFailed, match="the engine failed: KeyError") as caught:
        llm.generate(["The baton"], PARAMS, use_tqdm=False)
    llm.close()
    assert caught.value.errors
    assert [each() for each in made if each() is not None] == []
    assert list_mappings(tmp_path) == []
