"""How much memory a node's cache gets, and what it says when that cannot be."""

from pathlib import Path

import pytest

from baton.config import Config
from baton.errors import ConfigError
from baton.memory_size import parse_memory
from node_engine.host.engines import cache_blocks

FREE = 100 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", 1 << 30),
        ("4GiB", 4 << 30),
        ("0.5GiB", 512 << 20),
        ("512MiB", 512 << 20),
        ("1048576", 1 << 20),
        ("0.5", 50 << 30),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text, FREE) == size


def test_auto_leaves_a_small_folder_its_room() -> None:
    assert parse_memory("auto", 1 << 30) == (1 << 30) // 10


@pytest.mark.parametrize("text", ["", "much", "4GB", "inf", "nan", "infGiB", "1e400", "0", "-1", "-0.5", "-1GiB"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_memory(text, FREE)
    assert repr(text) in str(caught.value)


def test_too_little_for_a_few_blocks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 3 blocks"):
        cache_blocks(Config(kv_memory="3000", segment_dir=str(tmp_path)), 1000)


def test_a_segment_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--segment-dir"):
        cache_blocks(Config(segment_dir="/nowhere/at/all"), 1000)
