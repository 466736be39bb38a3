"""Several processes and one image: races, crashes, and the end of the last user."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from baton.shared_memory.segment import list_stale_segments, remove_stale_segments
from node_engine.model.loading.packed_weights.store import PackedWeightStore
from tests.unit.node_engine.model.loading.packed_weights.weight_images import (
    KEY,
    SPECS,
    fill_region,
    has_right_bytes,
    open_cache,
    pack_into_cache,
    read_until,
    refuse_to_fill,
    run_user,
    segment_path,
    send_line,
)

WAITS = "waiting for another process"
FORKING = """
import gc, os, sys
from pathlib import Path
from tests.unit.node_engine.model.loading.packed_weights import weight_images as images
folder = Path(sys.argv[1])
weights = images.PackedWeightStore(folder, None).open_or_build(
    images.KEY, images.SPECS, images.fill_region
)
for child in range(2):
    if os.fork() == 0:
        if child:
            del weights
            gc.collect()
        sys.exit(0)
    os.wait()
    print("result", images.segment_path(folder).exists(), flush=True)
"""


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def end_input(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_forked_process_leaves_the_image_of_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = [line for line in printed.splitlines() if line.startswith("result")]
    assert results == ["result True"] * 2
    assert not list(tmp_path.iterdir())


def test_of_several_that_start_at_once_one_packs_and_the_others_wait(tmp_path: Path) -> None:
    with run_user(tmp_path, stop_at="norm") as packer:
        read_until(packer, "fill norm")
        with ExitStack() as stack:
            waiting = [stack.enter_context(run_user(tmp_path)) for _ in range(2)]
            for process in waiting:
                read_until(process, WAITS)
            send_line(packer)
            assert read_until(packer, "result") == "result checkpoint True True"
            for process in waiting:
                assert read_until(process, "result") == "result segment True True"


def test_processes_that_start_at_the_same_moment_pack_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        users = [stack.enter_context(run_user(tmp_path)) for _ in range(4)]
        results = sorted(read_until(user, "result") for user in users)
    assert results == ["result checkpoint True True", *["result segment True True"] * 3]


def test_a_waiter_packs_if_the_packer_dies(tmp_path: Path) -> None:
    with run_user(tmp_path, stop_at="norm") as packer:
        read_until(packer, "fill norm")
        with run_user(tmp_path) as waiter:
            read_until(waiter, WAITS)
            kill(packer)
            assert read_until(waiter, "result") == "result checkpoint True True"


def test_a_half_written_segment_is_never_used(tmp_path: Path) -> None:
    with run_user(tmp_path, stop_at="layer.0") as packer:
        read_until(packer, "fill layer.0")
        kill(packer)
    with segment_path(tmp_path).open("rb") as left:
        assert os.fstat(left.fileno()).st_size > 0
        weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
        assert os.fstat(left.fileno()).st_nlink == 0
    assert weights.source == "checkpoint"
    assert has_right_bytes(weights)


def test_a_packer_that_stands_still_is_not_waited_for_longer_than_patience(tmp_path: Path) -> None:
    with run_user(tmp_path, stop_at="norm") as packer:
        read_until(packer, "fill norm")
        store = PackedWeightStore(tmp_path, None, patience_seconds=0.05)
        weights = store.open_or_build(KEY, SPECS, fill_region)
        assert not weights.is_shared
        assert has_right_bytes(weights)
        send_line(packer)
        assert read_until(packer, "result") == "result checkpoint True True"
        found = store.open_or_build(KEY, SPECS, refuse_to_fill)
        assert (found.source, found.is_shared) == ("segment", True)


def test_the_last_user_that_ends_removes_the_segment(tmp_path: Path) -> None:
    with run_user(tmp_path) as first, run_user(tmp_path) as second:
        for process in (first, second):
            read_until(process, "result")
        end_input(first)
        assert segment_path(tmp_path).exists()
        end_input(second)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_user_does_not_remove_it_from_others_and_the_last_is_reaped(
    tmp_path: Path,
) -> None:
    with run_user(tmp_path) as first, run_user(tmp_path) as second:
        for process in (first, second):
            read_until(process, "result")
        kill(first)
        assert remove_stale_segments(tmp_path) == []
        assert list_stale_segments(tmp_path) == []
        kill(second)
    assert list_stale_segments(tmp_path) == [segment_path(tmp_path).name]
    assert remove_stale_segments(tmp_path) == [segment_path(tmp_path).name]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_user_left_complete_is_used(tmp_path: Path) -> None:
    with run_user(tmp_path) as user:
        read_until(user, "result")
        kill(user)
    weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, refuse_to_fill)
    assert weights.source == "segment"
    assert has_right_bytes(weights)


def test_a_process_that_dies_while_it_reads_the_cache_file_leaves_no_image(
    tmp_path: Path,
) -> None:
    cache = open_cache(tmp_path / "cache")
    file = pack_into_cache(tmp_path, cache)
    # The file is damaged, so the process packs again: it stands still after it has read the file.
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with run_user(tmp_path, tmp_path / "cache", stop_at="embedding") as user:
        read_until(user, "fill embedding")
        kill(user)
    weights = PackedWeightStore(tmp_path, None).open_or_build(KEY, SPECS, fill_region)
    assert weights.source == "checkpoint"
    assert has_right_bytes(weights)
