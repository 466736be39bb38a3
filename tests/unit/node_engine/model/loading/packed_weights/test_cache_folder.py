import dataclasses
import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.errors import ConfigError
from baton.models.weight_cache import WeightCacheSettings
from node_engine.host.step_times_cache import open_step_times_cache
from node_engine.model.loading.packed_weights.cache_folder import (
    WeightCacheFolder,
    open_weight_cache,
)
from node_engine.model.loading.packed_weights.image_layout import plan_image
from node_engine.model.loading.packed_weights.image_memory import allocate_private_image
from node_engine.model.loading.packed_weights.store import PackedWeightStore
from tests.unit.node_engine.model.loading.packed_weights.weight_images import (
    KEY,
    LAYOUT,
    SPECS,
    fill_region,
    has_right_bytes,
    make_key_of_model,
    open_cache,
    pack_into_cache,
    refuse_to_fill,
)


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_cache_file_fills_the_next_segment_and_is_private(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    weights = PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, refuse_to_fill)
    assert weights.source == "cache file"
    assert weights.cache_writer is None
    assert has_right_bytes(weights)
    assert [file.path for file in cache.list_images()] == [path]


@pytest.mark.parametrize(
    "offset",
    [0, 9, 17, 40, *(region.offset for region in LAYOUT.regions if region.size_bytes)],
)
def test_a_flipped_bit_anywhere_is_found_and_the_file_is_made_again(
    tmp_path: Path, offset: int
) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    whole = path.read_bytes()
    flip_bit(path, offset)
    with capture_logs() as lines:
        weights = PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"
    assert has_right_bytes(weights)
    assert len([line for line in lines if line["log_level"] == "warning"]) == 1
    assert weights.cache_writer is not None
    weights.cache_writer.join()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["shorter", "longer", "empty", "symlink", "writable by others"])
def test_a_file_that_is_not_what_was_written_is_not_used(tmp_path: Path, kind: str) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    if kind == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "writable by others":
        path.chmod(0o606)
    else:
        size = path.stat().st_size
        os.truncate(path, {"shorter": size - 1, "longer": size + 1, "empty": 0}[kind])
    weights = PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"
    assert has_right_bytes(weights)


def test_a_disk_that_fails_while_it_is_read_is_no_error_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path / "cache")
    pack_into_cache(tmp_path, cache)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    weights = PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"
    assert has_right_bytes(weights)


def test_a_file_that_shrinks_while_it_is_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path / "cache")
    pack_into_cache(tmp_path, cache)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    weights = PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_leaves_no_file_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    cache = open_cache(tmp_path / "cache")
    header = LAYOUT.encode_header({spec.name: "0" * 16 for spec in SPECS})
    memory = allocate_private_image(LAYOUT)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with capture_logs() as lines:
        monkeypatch.setattr(os, call, refuse)
        assert not cache.save_image(LAYOUT, header, memory)
    assert list(cache.folder.iterdir()) == []
    assert [line["error"] for line in lines] == ["No space left on device"]


def test_a_read_only_file_system_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path / "cache")
    header = LAYOUT.encode_header({spec.name: "0" * 16 for spec in SPECS})
    memory = allocate_private_image(LAYOUT)
    open_file = os.open

    def refuse(path: str | Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(path, flags, *rest)

    def refuse_removal(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with capture_logs() as lines, monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        patched.setattr(os, "unlink", refuse_removal)
        assert not cache.save_image(LAYOUT, header, memory)
    assert [line["error"] for line in lines] == ["Read-only file system"]


def test_the_least_recently_used_images_are_dropped(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", max_bytes=3 * LAYOUT.image_bytes + 100)
    foreign = cache.folder / "notes.txt"
    foreign.write_text("kept")

    def use(model: int) -> str:
        weights = PackedWeightStore(tmp_path, cache).open_or_build(
            make_key_of_model(model), SPECS, fill_region
        )
        if weights.cache_writer is not None:
            weights.cache_writer.join()
        path = cache.image_path(plan_image(make_key_of_model(model), SPECS))
        os.utime(path, ns=(0, next(clock)))  # a coarse clock cannot put them in another order
        return weights.source

    clock = iter(range(1, 100))
    assert [use(model) for model in (0, 1, 2, 0, 3)] == [
        *["checkpoint"] * 3,
        "cache file",
        "checkpoint",
    ]
    kept = {file.path for file in cache.list_images()}
    assert kept == {
        cache.image_path(plan_image(make_key_of_model(model), SPECS)) for model in (0, 2, 3)
    }
    assert foreign.read_text() == "kept"


def test_a_use_of_an_image_is_recorded(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    os.utime(path, ns=(1, 1))
    PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, refuse_to_fill)
    assert path.stat().st_mtime_ns > 1


def test_an_image_larger_than_the_bound_evicts_nothing_and_is_not_written(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    small = WeightCacheFolder(cache.folder, LAYOUT.image_bytes - 1)
    with capture_logs() as lines:
        weights = PackedWeightStore(tmp_path, small).open_or_build(
            make_key_of_model(1), SPECS, fill_region
        )
        assert weights.cache_writer is not None
        weights.cache_writer.join()
    assert [file.path for file in small.list_images()] == [path]
    assert [line for line in lines if "--weight-cache-size" in line["event"]]


def test_what_an_interrupted_write_left_is_removed_by_the_next(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    (cache.folder / f".{'0' * 32}.unfinished").write_bytes(b"half")
    path = pack_into_cache(tmp_path, cache)
    assert list(cache.folder.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError):
        open_cache(folder)


def test_a_folder_that_cannot_be_used_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    named = WeightCacheSettings(blocked, 1, is_explicit=True)
    with pytest.raises(ConfigError, match=r"weight_cache_dir .*--weight-cache-dir"):
        open_weight_cache(named)
    with capture_logs() as lines:
        assert open_weight_cache(dataclasses.replace(named, is_explicit=False)) is None
    assert [line["log_level"] for line in lines] == ["warning"]
    assert open_weight_cache(None) is None
    usable = WeightCacheSettings(tmp_path / "cache", 5, is_explicit=True)
    cache = open_weight_cache(usable)
    assert cache is not None
    assert (cache.folder, cache.max_bytes) == (tmp_path / "cache", 5)


def test_a_folder_that_cannot_be_searched_is_said_once(tmp_path: Path) -> None:
    """Several parts of a node use it."""
    # Root may search every folder, so a name that is too long stands for one that it may not.
    folder = tmp_path / ("n" * 256) / "weights"
    settings = WeightCacheSettings(folder, 1, is_explicit=False)
    with capture_logs() as lines:
        assert open_weight_cache(settings) is None
        assert open_step_times_cache(settings, {}) is None
    assert [(line["log_level"], line["error"]) for line in lines] == [
        ("warning", "File name too long")
    ]
    named = dataclasses.replace(settings, is_explicit=True)
    with pytest.raises(ConfigError, match=r"File name too long: give --weight-cache-dir"):
        open_step_times_cache(named, {})
