"""Builds a node's client of its host's pool."""

from pathlib import Path
from typing import Protocol

from baton.config.memory_size import parse_memory_size
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.shared_memory.addressing import BlockAddressSpace
from kv_pool.client.pool_client import PoolClient
from kv_pool.common.protocol import PoolClientConfig

_RATE_SETTING = "pool_publish_rate"


class NodePoolContext(Protocol):
    """What a pool client needs of its node.

    `own_arena` is the node's own KV arena, mapped in `address_space`.
    """

    @property
    def config(self) -> NodeConfig: ...
    @property
    def name(self) -> str: ...
    @property
    def host_id(self) -> str: ...
    @property
    def model_digest(self) -> bytes: ...
    @property
    def layout(self) -> KVLayout: ...
    @property
    def address_space(self) -> BlockAddressSpace: ...
    @property
    def own_arena(self) -> memoryview: ...


def make_pool_client(context: NodePoolContext) -> PoolClient:
    """Build the client. Raises ConfigError for an invalid pool_publish_rate."""
    config = context.config
    rate = parse_memory_size(config.pool_publish_rate, 0, _RATE_SETTING)
    if not rate:  # a share of the total, which has no meaning for a rate
        raise ConfigError(
            f"{_RATE_SETTING} is {config.pool_publish_rate!r}: use 256MiB, or bytes per second",
            param=_RATE_SETTING,
        )
    client_config = PoolClientConfig(
        address=config.pool,
        token=config.cluster_token,
        node=context.name,
        host_id=context.host_id,
        model_digest=context.model_digest.hex(),
        layout=context.layout,
        segment_folder=Path(config.segment_dir),
        lookup_timeout_seconds=config.pool_patience,
        paced_bytes_per_second=float(rate),
    )
    return PoolClient(client_config, context.address_space, context.own_arena)
