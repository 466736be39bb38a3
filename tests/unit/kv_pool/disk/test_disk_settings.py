"""How large the disk's file is to be."""

from pathlib import Path

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.shared_memory import segment
from kv_pool.assemble import disk_settings
from kv_pool.disk.data_file import DISK_FILE_NAME

FILE_BYTES = 500_000  # bytes of the file that is there


@pytest.mark.parametrize(
    ("setting", "free", "size"),
    [
        ("0.5", 500_000, FILE_BYTES),  # beside the file, as when it was made
        ("0.5", 499_000, FILE_BYTES),  # the journal, a log
        ("0.5", 600_000, FILE_BYTES),
        ("0.5", 1_500_000, 1_000_000),
        ("0.2", 500_000, 200_000),
        ("490000", 500_000, 490_000),  # in so many words
    ],
)
def test_a_share_of_the_disk_is_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, free: int, size: int
) -> None:
    (tmp_path / DISK_FILE_NAME).write_bytes(bytes(FILE_BYTES))
    monkeypatch.setattr(segment, "free_bytes", lambda _: free)
    terms = disk_settings(Config(pool_disk=setting, pool_disk_dir=str(tmp_path)))
    assert terms is not None
    assert terms.size_bytes == size


def test_a_folder_that_cannot_be_searched_is_an_error(tmp_path: Path) -> None:
    # Root may search every folder, so a name that is too long stands for one that it may not.
    config = Config(pool_disk="0.5", pool_disk_dir=str(tmp_path / ("n" * 256)))
    with pytest.raises(ConfigError, match=r"File name too long\): give --pool-disk-dir another"):
        disk_settings(config)
