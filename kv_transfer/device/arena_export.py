"""The file beside a segment that says how to open the device memory behind it."""

import os
from pathlib import Path

import msgspec

from baton.errors import PeerUnreachable, UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.shared_memory.fence import ArenaFences
from baton.shared_memory.segment import DEVICE_SUFFIX, open_peer_segment
from kv_transfer.device.device_memory import ArenaExport, TransferDevice

_MAX_EXPORT_BYTES = 4096


def export_device(device: TransferDevice | None, fences: ArenaFences | None) -> Path | None:
    """Let peers open the arena of a node's device. Returns the file. Raises UnmappableSegment."""
    if device is None:
        return None
    if fences is None:
        raise ValueError("device memory behind an arena that is not a segment")
    return write_export(fences.segment_path, device.export_arena())


def write_export(segment_path: Path, export: ArenaExport) -> Path:
    """Write the file, private to this user. Raises UnmappableSegment; returns its path."""
    path = segment_path.with_name(segment_path.name + DEVICE_SUFFIX)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, msgspec.json.encode(export))
        finally:
            os.close(fd)
    except OSError as error:
        raise UnmappableSegment(f"{path}: {error.strerror}") from error
    return path


def read_export(folder: Path, segment: str, layout: KVLayout) -> ArenaExport:
    """Read the file of a peer's segment. Raises UnmappableSegment if it is not of this layout."""
    try:
        fd, _ = open_peer_segment(folder, segment)  # validates the name and the owner
        os.close(fd)
        fd = os.open(folder / (segment + DEVICE_SUFFIX), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            data = os.read(fd, _MAX_EXPORT_BYTES)
        finally:
            os.close(fd)
        export = msgspec.json.decode(data, type=ArenaExport)
    except PeerUnreachable as error:
        raise UnmappableSegment(error.message) from error
    except OSError as error:
        raise UnmappableSegment(f"device memory of {segment}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnmappableSegment(f"device memory of {segment}: {error}") from error
    theirs, ours = (
        (export.num_layers, export.slab_bytes),
        (layout.num_layers, layout.slab_bytes),
    )
    if theirs != ours:
        raise UnmappableSegment(
            f"(layers, slab bytes) of segment {segment} are {theirs}, this node's {ours}"
        )
    return export
