"""Mounting of the pool's disk: data file, journal, I/O thread and the index over the slots."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.process.clock import Clock
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.disk.journal_records import restore_tier
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.disk.data_file import DISK_FOLDER_FLAG, open_disk_file
from kv_pool.disk.io_thread import DiskIOThread
from kv_pool.disk.journal_file import DiskJournalFile


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """Where the data file is and how large it should be."""

    folder: Path
    size_bytes: int  # of the data file; rounded down to whole blocks


@dataclass(frozen=True, slots=True)
class MountedDisk:
    """A disk that is ready for use."""

    tier: CacheTier  # its blocks are the slots of the data file
    checksums: "array[int]"  # by slot: XXH3 of the block when it was published
    io_thread: DiskIOThread
    is_new: bool  # the data file was created anew


def mount_disk(
    disk_settings: DiskSettings,
    make_evictor: EvictorFactory,
    digest: str,
    layout: KVLayout,
    memory: BlockRows,
    clock: Clock,
    on_failed: Callable[[OSError], None],
    should_continue: Callable[[], bool],
) -> MountedDisk:
    """Open the disk's files and restore its index, which may take a while.

    `on_failed` is that of DiskIOThread. Raises ConfigError, which names the setting to change, and
    ShuttingDown once `should_continue` returns False.
    """
    folder = disk_settings.folder
    file = open_disk_file(folder, disk_settings.size_bytes, digest, layout, should_continue)
    try:
        journal = DiskJournalFile(folder, file, layout.block_size)
        tier = CacheTier(
            file.num_slots, layout.block_size, make_evictor(file.num_slots, layout.block_size)
        )
        checksums = array("Q", bytes(8 * file.num_slots))
        for entry in restore_tier(tier, journal.replay_entries(), clock()):
            checksums[entry.slot] = entry.checksum
    except OSError as error:
        file.close()
        raise ConfigError(
            f"the journal in {folder}: {error.strerror}: "
            f"choose another folder with {DISK_FOLDER_FLAG}"
        ) from None
    except BaseException:
        file.close()
        raise
    io_thread = DiskIOThread(file, journal, memory, layout.block_bytes, clock, on_failed)
    return MountedDisk(tier, checksums, io_thread, file.is_new)
