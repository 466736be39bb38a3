"""What a node says of itself when it joins, and what of that must be equal across the cluster."""

from dataclasses import dataclass, fields

from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from baton.types import NodeName, Role
from baton.wire import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """One node's announcement. `num_blocks` in KV blocks, `max_model_len` in tokens, `model_digest` in hex."""

    protocol_version: int
    name: NodeName
    role: Role
    host_id: str
    transfer_endpoint: str
    pid: int
    model_digest: str
    layout: KVLayout
    num_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    engine: str
    rejoining: str = ""

    @property
    def digest(self) -> bytes:
        """Of the model, as it goes into BlockHashes."""
        return bytes.fromhex(self.model_digest)


_EQUAL = ("engine", "model_digest", "vocab_size", "eos_token_ids")
_POSITIVE = ("num_blocks", "max_num_seqs", "max_batched_tokens", "max_model_len", "vocab_size")
_POSITIVE_OF_LAYOUT = ("num_layers", "num_kv_heads", "head_dim", "block_size")
MAX_NAME = 128
_HEX = frozenset("0123456789abcdef")


def identity(info: JoinInfo) -> dict[str, object]:
    """The facts that every node of a cluster shares, by field name, in the order in which they are compared."""
    shared: dict[str, object] = {name: getattr(info, name) for name in _EQUAL}
    shared["eos_token_ids"] = tuple(sorted(set(info.eos_token_ids)))
    for field in fields(info.layout):
        shared[f"layout.{field.name}"] = getattr(info.layout, field.name)
    return shared


def require_sane(info: JoinInfo) -> None:
    """Raises ConfigError for another protocol version, a bad name or a size below 1."""
    if info.protocol_version != PROTOCOL_VERSION:
        raise _mismatch(info, "protocol_version", info.protocol_version, PROTOCOL_VERSION)
    if not 0 < len(info.name) <= MAX_NAME or not info.name.isprintable():
        raise ConfigError(f"node name {info.name!r} must be 1 to {MAX_NAME} printable characters: set --name")
    if len(info.model_digest) % 2 or set(info.model_digest) - _HEX:
        raise ConfigError(f"node {info.name!r} has model_digest {info.model_digest[:64]!r}: it must be bytes in hex")
    sizes: dict[str, int] = {name: getattr(info, name) for name in _POSITIVE}
    sizes |= {f"layout.{name}": getattr(info.layout, name) for name in _POSITIVE_OF_LAYOUT}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"node {info.name!r} has {name} {size}: it must be at least 1", param=name)


def require_equal(info: JoinInfo, cluster: dict[str, object]) -> None:
    """Raises ConfigError naming the first field that differs from the cluster's identity, and both values."""
    for name, mine in identity(info).items():
        if mine != cluster[name]:
            raise _mismatch(info, name, mine, cluster[name])


def _mismatch(info: JoinInfo, field: str, mine: object, theirs: object) -> ConfigError:
    return ConfigError(
        f"node {info.name!r} has {field} {mine!r}, the cluster has {theirs!r}: start every node of a cluster with the "
        "same version, model and settings",
        param=field,
    )
