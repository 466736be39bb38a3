"""Weights that are read before it is known which ones are needed."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from node_engine.model.loading.packed_weights.cache_folder import WeightCacheFolder
from node_engine.model.loading.packed_weights.image_layout import (
    ImageLayout,
    RegionRecord,
    plan_image,
    read_layout,
)
from node_engine.model.loading.packed_weights.image_memory import ImageMemory
from node_engine.model.loading.packed_weights.last_image import LastImage
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
    segment_path,
)

OTHER_KEY = make_key_of_model(1)
OTHER_LAYOUT = plan_image(OTHER_KEY, SPECS)


class RecordingCache(WeightCacheFolder):
    """Notes which images are read, and may wait before it tells that a piece was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)
        self.read_images: list[str] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def load_image(
        self, layout: ImageLayout, memory: ImageMemory, on_read: Callable[[int], None]
    ) -> dict[str, str] | None:
        self.read_images.append(layout.image_id)

        def wait_and_tell(num_bytes: int) -> None:
            self.has_begun.set()
            assert self.may_go_on.wait(60)
            on_read(num_bytes)

        return super().load_image(layout, memory, wait_and_tell)


def pack_and_record(folder: Path) -> RecordingCache:
    pack_into_cache(folder, open_cache(folder / "cache"))
    return RecordingCache(folder / "cache")


def test_an_image_that_was_opened_early_is_used(tmp_path: Path) -> None:
    cache = pack_and_record(tmp_path)
    store = PackedWeightStore(tmp_path, cache)
    store.begin_opening(LAYOUT.image_id)
    weights = store.open_or_build(KEY, SPECS, refuse_to_fill)
    assert cache.read_images == [LAYOUT.image_id], "once, on the thread"
    assert (weights.source, weights.is_shared) == ("cache file", True)
    assert weights.image_id == LAYOUT.image_id
    assert has_right_bytes(weights)
    other = PackedWeightStore(tmp_path, cache)
    other.begin_opening(LAYOUT.image_id)
    assert other.open_or_build(KEY, SPECS, refuse_to_fill).source == "segment"
    del weights
    assert not segment_path(tmp_path).exists()


def test_another_image_than_the_expected_one_is_opened_and_the_first_one_released(
    tmp_path: Path,
) -> None:
    cache = open_cache(tmp_path / "cache")
    pack_into_cache(tmp_path, cache)
    store = PackedWeightStore(tmp_path, cache)
    store.begin_opening(LAYOUT.image_id)
    weights = store.open_or_build(OTHER_KEY, SPECS, fill_region)
    assert (weights.source, weights.image_id) == ("checkpoint", OTHER_LAYOUT.image_id)
    assert not segment_path(tmp_path).exists()
    assert segment_path(tmp_path, OTHER_LAYOUT).exists()
    assert store.open_or_build(KEY, SPECS, refuse_to_fill).source == "cache file"


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_an_image_that_nobody_needs_is_not_read_to_its_end(
    tmp_path: Path, is_cancelled: bool
) -> None:
    cache = pack_and_record(tmp_path)
    path = cache.image_path(LAYOUT)
    os.utime(path, (1.0, 1.0))
    cache.may_go_on.clear()
    store = PackedWeightStore(tmp_path, cache)
    with capture_logs() as lines:
        store.begin_opening(LAYOUT.image_id)
        assert cache.has_begun.wait(60)
        threading.Timer(0.05, cache.may_go_on.set).start()
        if is_cancelled:
            store.cancel_opening()
        else:
            weights = store.open_or_build(OTHER_KEY, SPECS, fill_region)
            assert weights.image_id == OTHER_LAYOUT.image_id
    assert not segment_path(tmp_path).exists()
    assert path.stat().st_mtime == 1.0, "it was not used"
    assert [line for line in lines if line["log_level"] == "warning"] == []


def test_weights_that_another_process_fills_are_waited_for_where_they_are_needed(
    tmp_path: Path,
) -> None:
    cache = pack_and_record(tmp_path)
    cache.may_go_on.clear()
    first, second = (PackedWeightStore(tmp_path, cache) for _ in range(2))
    first.begin_opening(LAYOUT.image_id)
    assert cache.has_begun.wait(60)
    second.begin_opening(LAYOUT.image_id)
    assert second._early is not None
    second._early._thread.join()
    cache.may_go_on.set()
    weights = second.open_or_build(KEY, SPECS, refuse_to_fill)
    assert (weights.source, cache.read_images) == ("segment", [LAYOUT.image_id])
    first.cancel_opening()
    assert has_right_bytes(weights)


def test_weights_that_nobody_asks_for_are_released(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    pack_into_cache(tmp_path, cache)
    store = PackedWeightStore(tmp_path, cache)
    store.begin_opening(LAYOUT.image_id)
    store.cancel_opening()
    assert not segment_path(tmp_path).exists()
    store.cancel_opening()
    assert store.open_or_build(KEY, SPECS, refuse_to_fill).source == "cache file"


@pytest.mark.parametrize("image_id", [LAYOUT.image_id, "../../etc/passwd", ""])
def test_an_image_without_a_file_is_packed(tmp_path: Path, image_id: str) -> None:
    for cache in (open_cache(tmp_path / "cache"), None):
        store = PackedWeightStore(tmp_path, cache)
        store.begin_opening(image_id)
        weights = store.open_or_build(KEY, SPECS, fill_region)
        assert weights.source == "checkpoint"
        assert has_right_bytes(weights)
        if weights.cache_writer is not None:
            weights.cache_writer.join()
            cache.image_path(LAYOUT).unlink()  # type: ignore[union-attr]
        del weights


def test_a_damaged_file_is_found_early_and_made_again(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    with path.open("r+b") as file:
        file.seek(LAYOUT.image_bytes - 1)
        file.write(b"\xff")
    store = PackedWeightStore(tmp_path, cache)
    with capture_logs() as lines:
        store.begin_opening(LAYOUT.image_id)
        weights = store.open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"
    assert has_right_bytes(weights)
    warnings = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert warnings == ["a cache file of packed weights cannot be used and is removed"]


def test_an_error_of_the_early_opening_is_raised_where_the_weights_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path / "cache")
    pack_into_cache(tmp_path, cache)

    def fail(*_: object) -> None:
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(cache, "load_image", fail)
    store = PackedWeightStore(tmp_path, cache)
    with capture_logs() as lines:
        store.begin_opening(LAYOUT.image_id)
        with pytest.raises(RuntimeError, match="on fire"):
            store.open_or_build(KEY, SPECS, fill_region)
    assert "packed weights are not read before they are needed" in [line["event"] for line in lines]
    assert not segment_path(tmp_path).exists()


def test_the_layout_of_a_file_is_that_of_its_image(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache")
    path = pack_into_cache(tmp_path, cache)
    assert cache.find_layout(LAYOUT.image_id) == LAYOUT
    path.chmod(0o622)
    assert cache.find_layout(LAYOUT.image_id) is None, "others may have written it"
    path.chmod(0o600)
    path.rename(cache.image_path(OTHER_LAYOUT))
    assert cache.find_layout(OTHER_LAYOUT.image_id) is None, "of another image"
    cache.image_path(OTHER_LAYOUT).rename(path)
    os.truncate(path, LAYOUT.image_bytes - 1)
    assert cache.find_layout(LAYOUT.image_id) is None
    os.truncate(path, 10)
    assert cache.find_layout(LAYOUT.image_id) is None


def encode(regions: Sequence[RegionRecord], image_bytes: int) -> bytes:
    layout = ImageLayout(KEY, tuple(regions), image_bytes)
    return layout.encode_header({region.name: "0" * 16 for region in regions})


def test_regions_that_overlap_or_miss_the_end_are_no_layout() -> None:
    good = [RegionRecord("a", 4096, 100), RegionRecord("b", 4224, 100)]
    assert read_layout(encode(good, 4324), 4324).regions == tuple(good)
    with pytest.raises(ValueError, match="its regions end at 4324"):
        read_layout(encode(good, 4324), 4325)
    for bad in (
        [good[0], msgspec.structs.replace(good[1], offset=4195)],
        [msgspec.structs.replace(good[0], size_bytes=-1), good[1]],
        [msgspec.structs.replace(good[0], offset=8), good[1]],
        [],
    ):
        with pytest.raises(ValueError, match=r"lies in another one|its regions end"):
            read_layout(encode(bad, 4324), 4324)


def test_the_last_image_is_remembered_for_the_same_settings(tmp_path: Path) -> None:
    last = LastImage(tmp_path, {"model": "a", "quantize": "none"})
    assert last.find_image_id() is None
    last.save_image_id(LAYOUT.image_id)
    last.save_image_id(LAYOUT.image_id)
    assert LastImage(tmp_path, {"quantize": "none", "model": "a"}).find_image_id() == (
        LAYOUT.image_id
    )
    assert LastImage(tmp_path, {"model": "a", "quantize": "int8"}).find_image_id() is None
    last.save_image_id(OTHER_LAYOUT.image_id)
    assert last.find_image_id() == OTHER_LAYOUT.image_id
    assert len(list(tmp_path.iterdir())) == 1
    last._files.write(last._key, b"../" * 10)
    assert last.find_image_id() is None


def test_a_full_disk_only_costs_the_memory_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = LastImage(tmp_path, {})

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(last._files, "write", refuse)
    with capture_logs() as lines:
        last.save_image_id(LAYOUT.image_id)
    assert lines[0]["error"] == "No space left on device"
