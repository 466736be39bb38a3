"""A pool that cannot start says why in one line that names the setting to change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool.harness import ROOT


@pytest.mark.parametrize(
    ("settings", "error_text"),
    [
        ({"BATON_POOL_MEMORY": "900TiB"}, "--pool-memory"),
        ({"BATON_POOL_MEMORY": "much"}, "pool_memory is 'much'"),
        ({"BATON_SEGMENT_DIR": "/nowhere"}, "--segment-dir"),
        ({"BATON_POOL_DISK": "much", "BATON_POOL_DISK_DIR": "/tmp"}, "pool_disk is 'much'"),
        ({"BATON_POOL_DISK": "1GiB"}, "--pool-disk-dir"),
        ({"BATON_LISTEN": "192.0.2.1:0", "BATON_CLUSTER_TOKEN": "t"}, "--listen"),
        ({"BATON_LISTEN": "0.0.0.0:0"}, "--cluster-token"),
        ({"BATON_FAILPOINTS": "pool.nowhere=exit"}, "no failpoint"),
    ],
)
def test_bad_settings_stop_the_pool_with_one_line(
    tmp_path: Path, settings: dict[str, str], error_text: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kv_pool"],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "BATON_SEGMENT_DIR": str(tmp_path),
            "BATON_LOG_LEVEL": "error",
            **settings,
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert error_text in ended.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
