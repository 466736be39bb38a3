"""The weight image: packed regions of one model behind a header that describes them.

    0              magic, which is written last
    8              length of the header's JSON
    16             XXH3-64 of the JSON
    24             JSON: the key; name, offset, size and XXH3-64 of each region
    ...            the regions, each at a multiple of its alignment

The same bytes are in a cache file and in the memory that nodes compute with. Nothing here depends
on what a region has in it: the kernels that read a region define its format.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from baton.shared_memory.memory_map import HUGE_PAGE

REGION_ALIGNMENT = 64  # bytes of a cache line, and of the widest vector register
_MAGIC = b"BATONPW1"
_PREFIX = struct.Struct("<8sQQ")  # magic, length of the JSON, XXH3-64 of the JSON
PREFIX_BYTES = _PREFIX.size
_MAX_HEADER_BYTES = 16 << 20
_MAX_NAME_CHARACTERS = 256


class PackedWeightsKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the bytes of a packed model depend on. Another key is another image."""

    model_digest: str  # hexadecimal, over the architecture and every tensor as it is stored
    format_name: str  # of the kernels that read the regions
    format_version: int  # changes with each change of what a region contains
    cpu_features: str  # the instructions that the format was chosen for
    dtype: str
    quantization: str


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """What a packed model has one region for: one packed matrix, a norm, the embedding."""

    name: str  # unique in its image
    size_bytes: int
    alignment: int = REGION_ALIGNMENT  # bytes; a power of two up to a huge page


class RegionRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region as the header describes it."""

    name: str
    offset: int  # bytes from the start of the image
    size_bytes: int
    checksum: str = "0" * 16  # XXH3-64 in hexadecimal, of constant length


class _HeaderFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: PackedWeightsKey
    regions: tuple[RegionRecord, ...]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where the regions of an image lie."""

    key: PackedWeightsKey
    regions: tuple[RegionRecord, ...]  # by offset, without checksums
    image_bytes: int

    @property
    def image_id(self) -> str:
        """32 hexadecimal digits: equal for images of the same key and the same regions."""
        return hashlib.sha256(_encode_fields(self.key, self.regions)).hexdigest()[:32]

    @property
    def header_bytes(self) -> int:
        """What of the image can belong to the header."""
        return self.regions[0].offset if self.regions else self.image_bytes

    @property
    def segment_bytes(self) -> int:
        """Size of the image in memory: whole huge pages."""
        return -(-self.image_bytes // HUGE_PAGE) * HUGE_PAGE

    def encode_header(self, checksums: Mapping[str, str]) -> bytes:
        """The header of an image whose regions have these XXH3-64 checksums, with its magic."""
        regions = [
            msgspec.structs.replace(region, checksum=checksums[region.name])
            for region in self.regions
        ]
        fields = _encode_fields(self.key, regions)
        return _PREFIX.pack(_MAGIC, len(fields), xxhash.xxh3_64_intdigest(fields)) + fields

    def decode_header(self, header: bytes | memoryview) -> dict[str, str]:
        """Return the checksum of each region of an image that begins with `header`.

        Raises ValueError unless the header is complete, undamaged, and describes this layout.
        """
        found = _decode_fields(header)
        if found.key != self.key or _without_checksums(found.regions) != self.regions:
            raise ValueError("the image is that of other weights, or packed in another format")
        return {region.name: region.checksum for region in found.regions}


def read_layout(header: bytes, image_bytes: int) -> ImageLayout:
    """Return the layout of an image of `image_bytes` that begins with `header`.

    Raises ValueError unless the header is complete, undamaged, and describes such an image.
    """
    found = _decode_fields(header)
    end = 0
    for region in found.regions:
        if region.offset < end or region.size_bytes < 0:
            raise ValueError(f"region {region.name} lies in another one")
        end = region.offset + region.size_bytes
    if not found.regions or found.regions[0].offset < _PREFIX.size or end != image_bytes:
        raise ValueError(f"the image has {image_bytes} bytes, and its regions end at {end}")
    return ImageLayout(found.key, _without_checksums(found.regions), image_bytes)


def count_header_bytes(prefix: bytes) -> int:
    """Bytes of the header that begins with `prefix`, PREFIX_BYTES of it; at most 16 MiB.

    Raises ValueError for the beginning of anything else.
    """
    if len(prefix) < PREFIX_BYTES:
        raise ValueError("the header is too short")
    magic: bytes
    length: int
    magic, length, _ = _PREFIX.unpack_from(prefix)
    if magic != _MAGIC:
        raise ValueError("the image is not complete, or of another format")
    return PREFIX_BYTES + min(length, _MAX_HEADER_BYTES)


def split_magic(header: bytes) -> tuple[bytes, bytes]:
    """Split a header into its magic, which is written last, and what follows it."""
    return header[: len(_MAGIC)], header[len(_MAGIC) :]


def plan_image(key: PackedWeightsKey, specs: Sequence[RegionSpec]) -> ImageLayout:
    """Place the regions in their order. Raises ValueError for specs that cannot be placed."""
    _check_specs(specs)
    # Offsets have fewer digits than the bound that stands for them, so the header fits.
    widest = [RegionRecord(spec.name, 1 << 62, spec.size_bytes) for spec in specs]
    header_bytes = _PREFIX.size + len(_encode_fields(key, widest))
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{len(specs)} regions need a header of {header_bytes} bytes")
    end, regions = header_bytes, []
    for spec in specs:
        offset = -(-end // spec.alignment) * spec.alignment
        regions.append(RegionRecord(spec.name, offset, spec.size_bytes))
        end = offset + spec.size_bytes
    return ImageLayout(key, tuple(regions), end)


def _check_specs(specs: Sequence[RegionSpec]) -> None:
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two regions have the same name")
    for spec in specs:
        if not 0 < len(spec.name) <= _MAX_NAME_CHARACTERS:
            raise ValueError(f"region name {spec.name[:80]!r} has not 1 to 256 characters")
        if spec.size_bytes < 0:
            raise ValueError(f"region {spec.name} has {spec.size_bytes} bytes")
        alignment = spec.alignment
        if not 0 < alignment <= HUGE_PAGE or alignment & (alignment - 1):
            raise ValueError(f"region {spec.name} is aligned to {alignment} bytes")


def _decode_fields(header: bytes | memoryview) -> _HeaderFields:
    end = count_header_bytes(bytes(header[:PREFIX_BYTES]))
    _, length, checksum = _PREFIX.unpack_from(header)
    fields = bytes(header[PREFIX_BYTES:end])
    if len(fields) != length or xxhash.xxh3_64_intdigest(fields) != checksum:
        raise ValueError("the header is damaged")
    try:
        return msgspec.json.decode(fields, type=_HeaderFields)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the header is damaged: {error}") from None


def _without_checksums(regions: Sequence[RegionRecord]) -> tuple[RegionRecord, ...]:
    return tuple(RegionRecord(r.name, r.offset, r.size_bytes) for r in regions)


def _encode_fields(key: PackedWeightsKey, regions: Sequence[RegionRecord]) -> bytes:
    return msgspec.json.encode(_HeaderFields(key, tuple(regions)))
