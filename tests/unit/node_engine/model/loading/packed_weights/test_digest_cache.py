import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ConfigError
from node_engine.model.loading.packed_weights import checkpoint_fingerprint
from node_engine.model.loading.packed_weights.checkpoint_fingerprint import take_fingerprint
from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache

IDENTITY = {"quantization": "none", "architecture": {"layers": 2, "eos": (1, 2)}}
DIGEST = bytes(range(32))


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A safetensors file that changed long ago: the clock of fingerprints is an hour ahead."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(64.0)}, path)
    later = time.time_ns() + 3_600_000_000_000
    monkeypatch.setattr(checkpoint_fingerprint, "read_wall_clock_ns", lambda: later)
    return path


@pytest.fixture
def digests(tmp_path: Path) -> ModelDigestCache:
    (tmp_path / "cache").mkdir()
    return ModelDigestCache(tmp_path / "cache")


def remember(digests: ModelDigestCache, shard: Path) -> bool:
    found = take_fingerprint([shard])
    return digests.save_digest(found, found, IDENTITY, DIGEST)


def find(digests: ModelDigestCache, shard: Path) -> bytes | None:
    return digests.find_digest(take_fingerprint([shard]), IDENTITY)


def test_a_digest_is_found_again(digests: ModelDigestCache, shard: Path) -> None:
    assert find(digests, shard) is None
    assert remember(digests, shard)
    assert find(digests, shard) == DIGEST


def test_the_path_does_not_matter(digests: ModelDigestCache, shard: Path, tmp_path: Path) -> None:
    remember(digests, shard)
    (tmp_path / "mount").symlink_to(tmp_path)
    assert find(digests, tmp_path / "mount" / shard.name) == DIGEST


def write_in_place(shard: Path) -> None:
    """Change one weight, and put the times back that a program can put back."""
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_file(shard: Path) -> None:
    """Another file of the same size, header and times in its place."""
    before = shard.stat()
    other = shard.with_name("other")
    save_file({"weight": torch.arange(64.0) + 1}, other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(shard)


def write_another_header(shard: Path) -> None:
    save_file({"bias": torch.arange(64.0)}, shard)


def append(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("change", [write_in_place, replace_file, write_another_header, append])
def test_a_changed_file_is_hashed_again(
    digests: ModelDigestCache, shard: Path, change: Callable[[Path], None]
) -> None:
    assert remember(digests, shard)
    change(shard)
    assert find(digests, shard) is None


def test_another_identity_has_another_digest(digests: ModelDigestCache, shard: Path) -> None:
    remember(digests, shard)
    other = IDENTITY | {"quantization": "int8"}
    assert digests.find_digest(take_fingerprint([shard]), other) is None


def test_a_file_that_changed_while_it_was_read_is_not_remembered(
    digests: ModelDigestCache, shard: Path
) -> None:
    before = take_fingerprint([shard])
    write_in_place(shard)
    after = take_fingerprint([shard])
    assert not digests.save_digest(before, after, IDENTITY, DIGEST)
    assert find(digests, shard) is None


def test_a_file_that_changed_just_now_is_not_remembered(
    digests: ModelDigestCache, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change again within the resolution of its time stamps."""
    changed = shard.stat().st_ctime_ns
    monkeypatch.setattr(
        checkpoint_fingerprint, "read_wall_clock_ns", lambda: changed + 1_000_000_000
    )
    assert not remember(digests, shard)


@pytest.mark.parametrize("damage", ["flip", "truncate", "longer", "symlink", "writable by others"])
def test_a_damaged_or_foreign_digest_file_is_not_used(
    digests: ModelDigestCache, shard: Path, tmp_path: Path, damage: str
) -> None:
    remember(digests, shard)
    (file,) = (tmp_path / "cache").iterdir()
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "truncate":
        file.write_bytes(data[:31])
    elif damage == "longer":
        file.write_bytes(data + b"\0")
    elif damage == "symlink":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.chmod(0o622)
    assert find(digests, shard) is None


def test_the_number_of_digest_files_is_bounded(
    digests: ModelDigestCache, shard: Path, tmp_path: Path
) -> None:
    found = take_fingerprint([shard])
    for number in range(300):
        assert digests.save_digest(found, found, {"number": number}, DIGEST)
    assert len(list((tmp_path / "cache").iterdir())) == 256


def test_a_folder_that_is_gone_costs_only_the_digest(
    digests: ModelDigestCache, shard: Path
) -> None:
    digests.folder.rmdir()
    assert not remember(digests, shard)
    assert find(digests, shard) is None


@pytest.mark.parametrize("kind", ["missing", "short", "folder"])
def test_a_file_without_a_header(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "short":
        path.write_bytes(b"abc")
        assert take_fingerprint([path]).files
        return
    if kind == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        take_fingerprint([path])
