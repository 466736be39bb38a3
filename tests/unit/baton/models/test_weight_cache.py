import os
from pathlib import Path

import pytest

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.weight_cache import (
    WeightCacheSettings,
    require_private_folder,
    resolve_weight_cache,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/baton/weights"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/baton/weights"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/baton/weights"),
    ],
)
def test_the_default_is_in_the_users_cache_folder(environ: dict[str, str], folder: str) -> None:
    found = resolve_weight_cache(NodeConfig(), environ)
    assert found == WeightCacheSettings(Path(folder), 32 * GIB, is_explicit=False)


def test_without_a_home_there_is_no_cache() -> None:
    assert resolve_weight_cache(NodeConfig(), {}) is None


def test_it_can_be_switched_off_and_placed(tmp_path: Path) -> None:
    environ = {"HOME": "/h"}
    assert resolve_weight_cache(NodeConfig(weight_cache_dir="off"), environ) is None
    config = NodeConfig(weight_cache_dir=str(tmp_path / "new"), weight_cache_size="1GiB")
    assert resolve_weight_cache(config, environ) == WeightCacheSettings(
        tmp_path / "new", GIB, is_explicit=True
    )
    half = resolve_weight_cache(
        NodeConfig(weight_cache_dir=str(tmp_path), weight_cache_size="0.5"), environ
    )
    stat = os.statvfs(tmp_path)
    assert half is not None
    assert half.max_bytes == stat.f_blocks * stat.f_frsize // 2


def test_a_malformed_size_is_rejected() -> None:
    with pytest.raises(ConfigError, match="weight_cache_size is 'much'"):
        resolve_weight_cache(NodeConfig(weight_cache_size="much"), {"HOME": "/h"})


def test_a_folder_is_created_private_and_refused_if_others_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    require_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="only its owner may write"):
        require_private_folder(folder)


@pytest.mark.parametrize("size", ["1GiB", "0.5"])
def test_a_home_that_cannot_be_searched_has_a_folder_all_the_same(
    tmp_path: Path, size: str
) -> None:
    """Settings are resolved without an error; opening the folder later raises one."""
    # Root may search every folder, so a name that is too long stands for one that it may not.
    home = tmp_path / ("n" * 256)
    found = resolve_weight_cache(NodeConfig(weight_cache_size=size), {"HOME": str(home)})
    assert found is not None
    assert found.folder == home / ".cache/baton/weights"
    assert not found.is_explicit
