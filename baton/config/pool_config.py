"""The settings of a pool process."""

from dataclasses import dataclass
from typing import Annotated, Literal

from baton.config.common import (
    MemberConfig,
    StateFolderConfig,
    help_text,
)

NO_POOL = "0"  # value of --pool-memory and --pool-disk for no pool, no disk


@dataclass(frozen=True, kw_only=True)
class PoolConfig(MemberConfig, StateFolderConfig):
    """Settings that `python -m kv_pool` reads."""

    pool_memory: Annotated[
        str,
        help_text(
            "Memory of a host's pool: 4GiB, a share such as 0.5, auto: a tenth, at most 4GiB; "
            "0 is no pool"
        ),
    ] = "auto"
    pool_disk: Annotated[
        str,
        help_text(
            "Disk behind a host's pool, for what its memory evicts: 100GiB, a share such as 0.5; "
            "0 is none"
        ),
    ] = "0"
    pool_disk_dir: Annotated[
        str, help_text("Folder of the pool's disk file; that of --state-dir when empty")
    ] = ""
    pool_eviction: Annotated[
        Literal["cost", "lru"],
        help_text(
            "What leaves the pool first: what is least worth keeping, or least recently used"
        ),
    ] = "cost"

    @property
    def has_pool_disk(self) -> bool:
        """Whether the pool has a disk behind its memory."""
        return self.pool_disk.strip() != NO_POOL
