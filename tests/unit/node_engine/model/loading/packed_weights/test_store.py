import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.errors import ConfigError
from baton.shared_memory import segment
from baton.shared_memory.available_memory import AvailableMemory
from baton.shared_memory.memory_map import HUGE_PAGE
from node_engine.model.loading.packed_weights import image_memory
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
    region_bytes,
    segment_path,
)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A temporary folder in /dev/shm: only a tmpfs can have huge pages."""
    folder = Path(tempfile.mkdtemp(prefix="baton-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_regions_are_packed_once_and_mapped_where_the_key_says(tmp_path: Path) -> None:
    store = PackedWeightStore(tmp_path, None)
    weights = store.open_or_build(KEY, SPECS, fill_region)
    assert (weights.source, weights.is_shared) == ("checkpoint", True)
    assert has_right_bytes(weights)
    for spec in SPECS:
        region = weights.regions[spec.name]
        assert region.address % spec.alignment == 0
        assert region.view.readonly
    assert segment_path(tmp_path).stat().st_mode & 0o777 == 0o600
    again = store.open_or_build(KEY, SPECS, refuse_to_fill)
    assert (again.source, again.is_shared) == ("segment", True)
    assert has_right_bytes(again)


def test_memory_is_zero_before_it_is_filled(tmp_path: Path) -> None:
    def check_and_fill(name: str, memory: memoryview) -> None:
        assert not any(memory)
        fill_region(name, memory)

    cache = open_cache(tmp_path / "cache")
    file = pack_into_cache(tmp_path, cache)
    with file.open("r+b") as damaged:
        damaged.seek(LAYOUT.image_bytes - 1)
        damaged.write(b"\xff")
    PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, check_and_fill)


def test_arrays_keep_the_memory_and_the_segment(tmp_path: Path) -> None:
    weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
    array = np.frombuffer(weights.regions["norm"].buffer, dtype=np.uint8)
    del weights
    assert segment_path(tmp_path).exists()
    assert array.tobytes() == region_bytes("norm", 100)
    del array
    assert not segment_path(tmp_path).exists()


def test_the_segment_stays_until_its_last_user_is_gone(tmp_path: Path) -> None:
    store = PackedWeightStore(tmp_path, None)
    first = store.open_or_build(KEY, SPECS, fill_region)
    second = store.open_or_build(KEY, SPECS, refuse_to_fill)
    del first
    assert segment.remove_stale_segments(tmp_path) == []
    assert has_right_bytes(second)
    del second
    assert list(tmp_path.iterdir()) == []


def test_all_of_it_is_on_huge_pages_where_the_kernel_gives_them(memory_folder: Path) -> None:
    probe = segment.create_segment(memory_folder, "probe", HUGE_PAGE)
    can_have_huge_pages = probe.memory.has_huge_pages
    probe.close()
    if not can_have_huge_pages:
        pytest.skip("the kernel gives no huge pages in /dev/shm")
    store = PackedWeightStore(memory_folder, None)
    weights = store.open_or_build(KEY, SPECS, fill_region)
    assert weights.huge_page_share == 1.0
    assert store.open_or_build(KEY, SPECS, refuse_to_fill).huge_page_share == 1.0


def test_without_huge_pages_the_weights_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_memory, "collapse_to_huge_pages", lambda *_: False)
    with capture_logs() as lines:
        weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
    assert has_right_bytes(weights)
    assert weights.huge_page_share == 0.0
    (ready,) = [line for line in lines if line["event"] == "packed weights ready"]
    assert ready["huge_page_share"] == 0.0


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    def fail(name: str, memory: memoryview) -> None:
        raise OSError(errno.EIO, "the checkpoint cannot be read")

    store = PackedWeightStore(tmp_path, open_cache(tmp_path / "cache"))
    with pytest.raises(OSError, match="cannot be read"):
        store.open_or_build(KEY, SPECS, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert list((tmp_path / "cache").iterdir()) == []
    assert has_right_bytes(store.open_or_build(KEY, SPECS, fill_region))


def test_a_full_segment_folder_gives_private_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        segment,
        "measure_available_memory",
        lambda folder: AvailableMemory(LAYOUT.segment_bytes - 1, "free in segment folder", 0),
    )
    cache = open_cache(tmp_path / "cache")
    with capture_logs() as lines:
        weights = PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, fill_region)
    assert (weights.source, weights.is_shared) == ("checkpoint", False)
    assert has_right_bytes(weights)
    assert not segment_path(tmp_path).exists()
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "cannot hold" in warnings[0]["reason"]
    assert weights.cache_writer is not None
    weights.cache_writer.join()
    assert PackedWeightStore(tmp_path, cache).open_or_build(KEY, SPECS, refuse_to_fill).source == (
        "cache file"
    )


def test_a_folder_that_fills_while_it_is_used_gives_private_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
    assert not weights.is_shared
    assert has_right_bytes(weights)
    assert not segment_path(tmp_path).exists()


def test_memory_that_others_use_meanwhile_gives_private_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = AvailableMemory(1 << 20, "of the machine's memory available", 0)
    monkeypatch.setattr(image_memory, "measure_available_memory", lambda folder: little)
    weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
    assert not weights.is_shared
    assert has_right_bytes(weights)
    assert not segment_path(tmp_path).exists()


def test_too_little_memory_for_private_weights_is_an_error_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = AvailableMemory(1 << 20, "of the machine's memory available", 0)
    monkeypatch.setattr(segment, "measure_available_memory", lambda folder: little)
    monkeypatch.setattr(image_memory, "measure_private_memory", lambda: little)
    with pytest.raises(ConfigError, match=r"need 6291456 bytes.*1MiB of the machine's memory"):
        PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)


@pytest.mark.parametrize("kind", ["symlink", "folder", "open to others", "fifo"])
def test_a_foreign_file_in_place_of_the_segment_is_not_used(tmp_path: Path, kind: str) -> None:
    path = segment_path(tmp_path)
    target = tmp_path / "target"
    target.write_bytes(b"not ours")
    if kind == "symlink":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.touch()
        path.chmod(0o666)
    with capture_logs() as lines:
        weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
    assert not weights.is_shared
    assert has_right_bytes(weights)
    assert path.exists()
    assert target.read_bytes() == b"not ours"
    assert [line for line in lines if "not shared" in line["event"]]


def test_models_have_segments_of_their_own(tmp_path: Path) -> None:
    store = PackedWeightStore(tmp_path, None)
    held = [store.open_or_build(make_key_of_model(model), SPECS, fill_region) for model in range(3)]
    assert [weights.source for weights in held] == ["checkpoint"] * 3
    assert len(list(tmp_path.iterdir())) == 3
