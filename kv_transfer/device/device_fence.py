"""Fences of tickets whose writers write with a device: see docs/design/0019-kv-between-gpus.md."""

from pathlib import Path

from baton.shared_memory.fence import ArenaFences, WriterFences
from kv_transfer.device.writer_process import WriterProof


class DeviceTicketFence:
    """Decode's end: proves that the writer of one ticket writes no more."""

    def __init__(self, fences: ArenaFences, byte: int) -> None:
        self._fences = fences
        self._byte = byte
        self.proof: WriterProof | None = None  # of the writer, known from its Open on

    def try_fence(self) -> bool:
        """Whether the writer neither writes nor can. Stays true once it was.

        A marked byte that can be locked is of a writer that was killed with writes in flight: then
        only the proven end of the process suffices. Without one, the blocks stay quarantined.
        """
        if not self._fences.try_close_byte(self._byte):
            return False
        if not self._fences.is_marked(self._byte):
            return True
        return self.proof is not None and self.proof.has_ended()


class DeviceTicketLock:
    """The writer's end: the WriterLock of a ticket whose slabs a device writes."""

    def __init__(self, fences: WriterFences, byte: int) -> None:
        self._fences = fences
        self._byte = byte
        self.is_abandoned = False  # the device failed: what it still writes is unknown

    def try_acquire(self) -> bool:
        return self._fences.try_lock_for_device(self._byte)

    def release(self) -> None:
        """Give the byte back, unless the device failed: then it stays locked and marked."""
        if not self.is_abandoned:
            self._fences.unlock_from_device(self._byte)


class WriterProofs:
    """The proofs for all writer processes that have opened a ticket here, by their name."""

    def __init__(self, folder: Path, driver_file: Path) -> None:
        self._folder = folder
        self._driver_file = driver_file
        self._proofs: dict[str, WriterProof] = {}

    def get(self, name: str) -> WriterProof:
        """The proof for a living writer. Raises UnmappableSegment if there cannot be one."""
        for other, proof in list(self._proofs.items()):
            if proof.has_ended():
                del self._proofs[other]
        if name not in self._proofs:
            self._proofs[name] = WriterProof(self._folder, name, self._driver_file)
        return self._proofs[name]

    def close(self) -> None:
        for proof in self._proofs.values():
            proof.close()
        self._proofs.clear()
