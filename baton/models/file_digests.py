"""Digests of a model folder's files, cheap enough for a process that never loads the model.

The coordinator compares its digests with those of each node, so that no node serves another model
under the same name and no prompt is encoded with another tokenizer. Folders of equal files have
equal digests on every host.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DUMMY_WEIGHTS_DIGEST = "dummy"  # the weights are random (--load-format dummy)
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
# Keys that change neither token ids nor arithmetic.
_IGNORED_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "chat_template"}
)
_SINGLE_WEIGHTS_FILE, _WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 << 20  # the bound of the safetensors library
_SAMPLE_BYTES = 256  # sampled at the beginning, in the middle and at the end of each tensor


@dataclass(frozen=True, slots=True)
class ModelFileDigests:
    """Digests in hex; "" for files that are missing or cannot be read."""

    config_digest: str = ""  # of config.json
    tokenizer_digest: str = ""  # of the files that map text to token ids, not of chat templates
    weights_digest: str = ""  # of name, dtype, shape and samples of the bytes of every tensor


UNKNOWN_DIGESTS = ModelFileDigests()


def compute_file_digests(folder: Path, *, dummy: bool = False) -> ModelFileDigests:
    """Compute the digests of a folder. Reads at most 768 bytes of each tensor.

    With `dummy` no weights are read.
    """
    return ModelFileDigests(
        config_digest=_config_digest(folder),
        tokenizer_digest=_tokenizer_digest(folder),
        weights_digest=DUMMY_WEIGHTS_DIGEST if dummy else _weights_digest(folder),
    )


def _config_digest(folder: Path) -> str:
    spelled = _canonical_json(folder / _CONFIG)
    return hashlib.sha256(spelled).hexdigest() if spelled is not None else ""


def _tokenizer_digest(folder: Path) -> str:
    """Digest the tokenizer files that are used: tokenizer.json alone if it exists."""
    names = (_TOKENIZER,) if (folder / _TOKENIZER).exists() else _SLOW_TOKENIZER_FILES
    parts = {name: _read_or_none(folder / name) for name in names}
    if all(content is None for content in parts.values()):
        return ""
    parts |= {name: _canonical_json(folder / name) for name in _TOKENIZER_SETTINGS}
    digest = hashlib.sha256()
    for name, content in parts.items():
        if content is not None:
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _canonical_json(path: Path) -> bytes | None:
    content = _read_or_none(path)
    if content is None:
        return None
    try:
        read = json.loads(content)
    except ValueError:  # the code that uses the file reports the error
        return content
    if isinstance(read, dict):
        read = {key: value for key, value in read.items() if key not in _IGNORED_KEYS}
    return json.dumps(read, sort_keys=True).encode()


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _weights_digest(folder: Path) -> str:
    """Digest all tensors, whichever files they are split into. "" unless all can be read."""
    tensors: dict[str, str] = {}
    try:
        for name in _weight_files(folder):
            tensors.update(_sampled_tensors(folder / name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def _weight_files(folder: Path) -> list[str]:
    if (folder / _WEIGHTS_INDEX_FILE).exists():
        names = sorted(
            set(json.loads((folder / _WEIGHTS_INDEX_FILE).read_bytes())["weight_map"].values())
        )
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{folder / _WEIGHTS_INDEX_FILE} names files of other folders")
        return names
    return [_SINGLE_WEIGHTS_FILE]


def _sampled_tensors(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, description and digest) of each tensor of one safetensors file.

    Raises ValueError or OSError for an invalid file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = int.from_bytes(_read_exactly(descriptor, 8, 0), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path}: header of {length} bytes")
        header: dict[str, Any] = json.loads(_read_exactly(descriptor, length, 8))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                sample = hashlib.sha256(_sample(descriptor, begin, end)).hexdigest()
                yield name, f"{entry['dtype']} {entry['shape']} {sample}"
    finally:
        os.close(descriptor)


def _sample(descriptor: int, begin: int, end: int) -> bytes:
    if end - begin <= 3 * _SAMPLE_BYTES:
        return _read_exactly(descriptor, end - begin, begin)
    places = (begin, (begin + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES)
    return b"".join(_read_exactly(descriptor, _SAMPLE_BYTES, place) for place in places)


def _read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    found = os.pread(descriptor, size, offset)
    if len(found) != size:
        raise ValueError("the file is cut short")
    return found
