"""A disk that is ready: its file, its journal, the thread that waits for both, and the index over
its slots."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.kv.kv_layout import KVLayout
from baton.process.clock import Clock
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.disk.journal_records import restore_tier
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.disk.data_file import DISK_FOLDER_FLAG, open_disk_file
from kv_pool.disk.io_thread import DiskIOThread
from kv_pool.disk.journal_file import DiskJournalFile


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Where the file is, and about how many bytes it has."""

    folder: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MountedDisk:
    """`checksums`: by slot, the XXH3 that its block had when it was published. `is_new`: begun
    anew."""

    tier: CacheTier
    checksums: "array[int]"
    io_thread: DiskIOThread
    is_new: bool


def mount_disk(
    terms: DiskSettings,
    eviction: EvictorFactory,
    digest: str,
    layout: KVLayout,
    memory: BlockRows,
    clock: Clock,
    failed: Callable[[OSError], None],
    wanted: Callable[[], bool],
) -> MountedDisk:
    """It may take a while. Raises ConfigError, with the setting that mends it, and Draining once it
    is not `wanted` any more. `failed`: see DiskThread."""
    file = open_disk_file(terms.folder, terms.size_bytes, digest, layout, wanted)
    try:
        journal = DiskJournalFile(terms.folder, file, layout.block_size)
        tier = CacheTier(
            file.num_slots, layout.block_size, eviction(file.num_slots, layout.block_size)
        )
        sums = array("Q", bytes(8 * file.num_slots))
        for entry in restore_tier(tier, journal.replay_entries(), clock()):
            sums[entry.slot] = entry.checksum
    except OSError as error:
        file.close()
        raise ConfigError(
            f"the journal in {terms.folder}: {error.strerror}: choose another folder with {DISK_FOLDER_FLAG}"
        ) from None
    except BaseException:
        file.close()
        raise
    return MountedDisk(
        tier,
        sums,
        DiskIOThread(file, journal, memory, layout.block_bytes, clock, failed),
        file.is_new,
    )
