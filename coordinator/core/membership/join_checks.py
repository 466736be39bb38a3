"""The checks that a node must pass when it joins the cluster."""

from dataclasses import dataclass
from typing import Protocol

from baton.cluster_link.messages import PROTOCOL_VERSION, JoinInfo
from baton.errors import ConfigError
from baton.models.file_digests import UNKNOWN_DIGESTS, ModelFileDigests
from baton.models.model_identity import ModelIdentity
from baton.types import NodeName


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the coordinator serves; empty facts are unknown and not compared."""

    engine: str = ""
    files: ModelFileDigests = UNKNOWN_DIGESTS


_POSITIVE = ("num_blocks", "max_num_seqs", "max_batched_tokens", "max_model_len", "vocab_size")
_POSITIVE_OF_LAYOUT = ("num_layers", "num_kv_heads", "head_dim", "block_size")
MAX_NAME_LENGTH = 128
_MIN_RETRY_AFTER = 0.1  # seconds
_BOUND_MODEL_RETRY_AFTER = (
    1.0  # seconds between a node's attempts to join while requests of another model live
)
_HEX = frozenset("0123456789abcdef")
_SAME_SETTINGS_REMEDY = "start every node of a cluster with the same version, model and settings"
_SAME_MODEL_REMEDY = (
    "start the coordinator and its nodes with the same --model, --engine and --load-format"
)


def require_valid_join(info: JoinInfo) -> None:
    """Raise ConfigError for another protocol version, a bad name, no nonce or a size below 1."""
    if info.protocol_version != PROTOCOL_VERSION:
        raise _mismatch(
            info, "protocol_version", info.protocol_version, f"the cluster has {PROTOCOL_VERSION}"
        )
    if not 0 < len(info.name) <= MAX_NAME_LENGTH or not info.name.isprintable():
        raise ConfigError(
            f"node name {info.name!r} must be 1 to {MAX_NAME_LENGTH} printable characters: set"
            " --name"
        )
    require_process_nonce(info)
    if len(info.model_digest) % 2 or set(info.model_digest) - _HEX:
        raise ConfigError(
            f"node {info.name!r} has model_digest {info.model_digest[:64]!r}: it must be bytes"
            " in hex"
        )
    sizes: dict[str, int] = {name: getattr(info, name) for name in _POSITIVE}
    sizes |= {f"layout.{name}": getattr(info.layout, name) for name in _POSITIVE_OF_LAYOUT}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(
                f"node {info.name!r} has {name} {size}: it must be at least 1", param=name
            )


def require_cluster_model(info: JoinInfo, cluster: ModelIdentity, bound_requests: int) -> None:
    """Raise ConfigError naming the first field that differs from the cluster's identity.

    `bound_requests` were placed on nodes of that identity, and no node of it is left. They will
    end, so the error then has a `retry_after`.
    """
    theirs = cluster.named_fields()
    for name, mine in info.model.named_fields().items():
        if mine == theirs[name]:
            continue
        ours = f"the cluster has {theirs[name]!r}"
        if not bound_requests:
            raise _mismatch(info, name, mine, ours)
        remedy = (
            f"{bound_requests} requests of that model have not ended: bring a node of it back,"
            " or wait until they have"
            " ended (--request-timeout)"
        )
        raise _mismatch(info, name, mine, ours, remedy, retry_after=_BOUND_MODEL_RETRY_AFTER)


def require_served_model(info: JoinInfo, served: ServedModel) -> None:
    """Raise ConfigError unless the node's model is the one that the coordinator tokenizes for.

    What either side does not know is not compared.
    """
    files = info.files
    compared = (
        ("engine", info.engine, served.engine),
        ("config_digest", files.config_digest, served.files.config_digest),
        ("tokenizer_digest", files.tokenizer_digest, served.files.tokenizer_digest),
        ("weights_digest", files.weights_digest, served.files.weights_digest),
    )
    for name, mine, ours in compared:
        if mine and ours and mine != ours:
            raise _mismatch(
                info, name, mine, f"the coordinator's --model has {ours!r}", _SAME_MODEL_REMEDY
            )


class MemberIdentity(Protocol):
    """The identity of a process that is, or wants to be, a member: a node or a pool."""

    @property
    def name(self) -> NodeName: ...
    @property
    def process(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def host_id(self) -> str: ...


def require_process_nonce(info: MemberIdentity) -> None:
    """Raise ConfigError for a join without `process`: two of those could take each other's name."""
    if not info.process:
        raise ConfigError(
            f"{info.name!r} has process '': it must be a random value of the process's own",
            param="process",
        )


def require_free_name(info: MemberIdentity, held_by: MemberIdentity, free_in: float) -> None:
    """Raise ConfigError unless the member `held_by` is an earlier stream of the same process.

    `free_in`: seconds until that member counts as silent if it sends nothing more.
    """
    if info.process != held_by.process:
        raise ConfigError(
            f"the name {info.name!r} is in use by process {held_by.pid} of host"
            f" {held_by.host_id[:16]!r}, which is"
            " alive: give one of the two another --name, or stop one",
            param="name",
            retry_after=max(free_in, _MIN_RETRY_AFTER),
        )


def _mismatch(
    info: JoinInfo,
    field: str,
    mine: object,
    theirs: str,
    remedy: str = _SAME_SETTINGS_REMEDY,
    retry_after: float | None = None,
) -> ConfigError:
    message = f"node {info.name!r} has {field} {mine!r}, {theirs}: {remedy}"
    return ConfigError(message, param=field, retry_after=retry_after)
