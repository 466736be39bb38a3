"""A disk that is ready: its file, its journal, the thread that waits for both, and the index over its slots."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.clock import Clock
from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from kv_pool.block_rows import BlockRows
from kv_pool.core.disk_journal import restore
from kv_pool.core.policies import Eviction
from kv_pool.core.tier import Tier
from kv_pool.disk_file import FOLDER_KNOB, open_disk
from kv_pool.disk_journal_file import DiskJournal
from kv_pool.disk_thread import DiskThread


@dataclass(frozen=True, slots=True)
class DiskTerms:
    """Where the file is, and about how many bytes it has."""

    folder: Path
    size: int


@dataclass(frozen=True, slots=True)
class Disk:
    """`sums`: by slot, the XXH3 that its block had when it was published. `fresh`: begun anew."""

    tier: Tier
    sums: "array[int]"
    thread: DiskThread
    fresh: bool


def mount(
    terms: DiskTerms,
    eviction: Eviction,
    digest: str,
    layout: KVLayout,
    memory: BlockRows,
    clock: Clock,
    failed: Callable[[OSError], None],
    wanted: Callable[[], bool],
) -> Disk:
    """It may take a while. Raises ConfigError, with the setting that mends it, and Draining once it is not `wanted` any
    more. `failed`: see DiskThread."""
    file = open_disk(terms.folder, terms.size, digest, layout, wanted)
    try:
        journal = DiskJournal(terms.folder, file, layout.block_size)
        tier = Tier(file.slots, layout.block_size, eviction(file.slots, layout.block_size))
        sums = array("Q", bytes(8 * file.slots))
        for entry in restore(tier, journal.entries(), clock()):
            sums[entry.slot] = entry.checksum
    except OSError as error:
        file.close()
        raise ConfigError(
            f"the journal in {terms.folder}: {error.strerror}: choose another folder with {FOLDER_KNOB}"
        ) from None
    except BaseException:
        file.close()
        raise
    return Disk(tier, sums, DiskThread(file, journal, memory, layout.block_bytes, clock, failed), file.fresh)
