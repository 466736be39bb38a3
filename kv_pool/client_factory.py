"""A node's client of its host's pool, from what the node has."""

from pathlib import Path
from typing import Protocol

from baton.addressing import AddressSpace
from baton.config import Config
from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from baton.memory_size import parse_memory
from kv_pool.client import PoolClient
from kv_pool.terms import PoolClientConfig

_RATE = "pool_publish_rate"


class ClientParts(Protocol):
    """The part of a node's parts that a client needs; `own` is its arena, mapped in `space`."""

    @property
    def config(self) -> Config: ...
    @property
    def name(self) -> str: ...
    @property
    def host_id(self) -> str: ...
    @property
    def model_digest(self) -> bytes: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def space(self) -> AddressSpace: ...
    @property
    def own(self) -> memoryview: ...


def pool_client(parts: ClientParts) -> PoolClient:
    """Raises ConfigError for a rate that is none."""
    config = parts.config
    rate = parse_memory(config.pool_publish_rate, 0, _RATE)
    if not rate:  # a share, and of what?
        raise ConfigError(f"{_RATE} is {config.pool_publish_rate!r}: say 256MiB, or bytes a second", param=_RATE)
    terms = PoolClientConfig(
        address=config.pool,
        token=config.cluster_token,
        node=parts.name,
        host_id=parts.host_id,
        model_digest=parts.model_digest.hex(),
        layout=parts.layout,
        segment_folder=Path(config.segment_dir),
        find_patience=config.pool_patience,
        paced_bytes_per_second=float(rate),
    )
    return PoolClient(terms, parts.space, parts.own)
