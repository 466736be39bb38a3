"""--model org/name: from the hub's cache, or with one line that says why not. Nothing here has a
network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.models.model_source import with_local_model

ROOT = Path(__file__).resolve().parents[4]
NAME = "a-team/a-model"
REVISION = "0123456789abcdef0123456789abcdef01234567"
COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")
A_REPOSITORY = (
    *(
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "params.json",
        "modeling_own.py",
    ),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ),
    *(
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ),
    *(
        "consolidated.safetensors",
        "pytorch_model.bin",
        "model.pt",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
    ),
    *("onnx/config.json", "gguf/model.gguf"),
)


def put_into_cache(hub: Path, files: dict[str, str]) -> Path:
    """The hub's cache as its client lays it out."""
    home = hub / f"models--{NAME.replace('/', '--')}"
    snapshot = home / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    for file, content in files.items():
        (snapshot / file).write_text(content)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no way to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def resolve(**settings: Any) -> Config:
    return with_local_model(Config(model=NAME, **settings))


def test_a_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in (NAME, str(tmp_path / NAME), ""):
        config = Config(model=model)
        assert with_local_model(config) is config
    for model in ("no-such-folder", "/no/such", "../no", "a/b/c"):
        with pytest.raises(ConfigError, match=f"--model {model}: there is no such folder"):
            with_local_model(Config(model=model))
    assert resolve(engine="paced").model == NAME


def test_a_cached_model_needs_no_network_and_keeps_its_name(hub: Path) -> None:
    snapshot = put_into_cache(hub, dict.fromkeys(COMPLETE, "{}"))
    config = resolve()
    assert (config.model, config.served_model_name) == (str(snapshot), "a-model")
    assert resolve(served_model_name="mine").served_model_name == "mine"


def test_shards_are_those_of_the_index(hub: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    small = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors.index.json": index}
    snapshot = put_into_cache(hub, small | {"model-1.safetensors": ""})
    with pytest.raises(
        ConfigError, match=r"a-team/a-model: .* lacks model-2\.safetensors: connect"
    ):
        resolve()
    assert resolve(load_format="dummy").model == str(snapshot)
    assert with_local_model(Config(model=NAME), weights=False).model == str(snapshot)
    (snapshot / "model-2.safetensors").touch()
    assert resolve().model == str(snapshot)


class FakeHub:
    """Stands for the hub's client: the cache is `cached`, a download brings `downloaded` or raises
    it."""

    def __init__(self, cached: Path | None, downloaded: Path | Exception) -> None:
        self.cached = cached
        self.downloaded = downloaded
        self.fetched: list[str] = []

    def __call__(
        self,
        name: str,
        *,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool,
    ) -> str:
        assert name == NAME
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("not in the cache")
            return str(self.cached)
        found = filter_repo_objects(
            A_REPOSITORY, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        self.fetched = list(found)
        if isinstance(self.downloaded, Exception):
            raise self.downloaded
        return str(self.downloaded)


def folder_with(path: Path, *files: str) -> Path:
    path.mkdir()
    for file in files:
        (path / file).write_text("{}")
    return path


def test_only_missing_needed_files_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = folder_with(tmp_path / "whole", *COMPLETE)
    partial = folder_with(tmp_path / "partial", "config.json", "tokenizer.json")
    for cached in (None, partial):
        fake = FakeHub(cached, whole)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        assert resolve().model == str(whole)
        assert set(fake.fetched) == {
            *(
                "config.json",
                "generation_config.json",
                "params.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ),
            *(
                "tokenizer.model",
                "vocab.json",
                "merges.txt",
                "chat_template.jinja",
                "model.safetensors.index.json",
            ),
            *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        }
    fake = FakeHub(None, whole)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with_local_model(Config(model=NAME), weights=False)
    assert not [file for file in fake.fetched if file.endswith(".safetensors")]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake := FakeHub(whole, whole))
    assert resolve().model == str(whole)
    assert fake.fetched == []


def from_the_hub(kind: type[Exception]) -> Exception:
    """An answer of the hub as its client raises it, without the response that it carries."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "cause", "fix"),
    [
        (
            LocalEntryNotFoundError("no way out\nsecond line"),
            "cannot be reached (no way out)",
            "connect this machine",
        ),
        (from_the_hub(RepositoryNotFoundError), "no such model", "HF_TOKEN"),
        (from_the_hub(GatedRepoError), "consent", "accept the terms"),
        (OSError(28, "No space left on device"), "No space left on device", "HF_HOME"),
        (RuntimeError("a proxy said no"), "a proxy said no", "name a folder"),
    ],
    ids=["offline", "unknown", "gated", "full disk", "other"],
)
def test_a_failed_download_is_one_line_with_cause_and_fix(
    error: Exception, cause: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(None, error))
    with pytest.raises(ConfigError) as refused:
        resolve()
    message = refused.value.message
    assert message.startswith(f"--model {NAME}: no such folder here, and ")
    assert cause in message
    assert fix in message
    assert "\n" not in message


def test_offline_mode_is_named(hub: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve()
    assert "HF_HUB_OFFLINE forbids to download it: unset that" in refused.value.message
    assert str(hub) in refused.value.message


@pytest.mark.slow
@pytest.mark.parametrize("module", ["coordinator", "prefill_node"])
def test_a_process_started_by_itself_resolves_and_refuses(module: str, tmp_path: Path) -> None:
    environ = os.environ | {
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "BATON_COORDINATOR": "127.0.0.1:1",
    }
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    command = [sys.executable, "-m", module, "--model", NAME]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"error: --model {NAME}: no such folder here, and HF_HUB_OFFLINE forbids"
    )
    assert ended.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_searched_is_an_error(tmp_path: Path) -> None:
    # Root may search every folder, so a name that is too long stands for one that it may not.
    model = tmp_path / ("n" * 256)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        with_local_model(Config(model=str(model)))


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="this user may not list and search the folder"):
        with_local_model(Config(model=str(tmp_path)))
