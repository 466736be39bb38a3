"""Keeps the shared pools of hosts that have joined.

They send reports like nodes, but get no attempts. The blocks of a pool are available to every node
of its host.
"""

from dataclasses import dataclass

from baton.cluster_link.messages import PROTOCOL_VERSION, PoolJoinInfo
from baton.cluster_link.report_types import NodeStats
from baton.errors import ConfigError, NodeLost
from baton.models.model_identity import ModelIdentity
from baton.types import Incarnation, PeerAddress
from coordinator.core.membership.join_checks import (
    MAX_NAME_LENGTH,
    require_free_name,
    require_process_nonce,
)


@dataclass(slots=True)
class PoolMember:
    """One membership of a pool, from a join to the loss of its connection."""

    info: PoolJoinInfo
    incarnation: Incarnation
    joined_at: float
    heard_at: float
    stats: NodeStats | None = None  # None until its first heartbeat

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.info.name, self.incarnation, self.info.host_id, self.info.endpoint)


class PoolRegistry:
    """All pools that are members; `silence` in seconds."""

    def __init__(self, silence: float) -> None:
        self.members: dict[Incarnation, PoolMember] = {}
        self._silence = silence

    def check_join(
        self, info: PoolJoinInfo, model: ModelIdentity | None, now: float
    ) -> PoolMember | None:
        """Check whether the pool may join nodes that serve `model`; return the member it would
        replace.

        Raises ConfigError naming the first field that differs; one with `retry_after` may go away
        with time.
        """
        _require_equal(info, "protocol_version", info.protocol_version, PROTOCOL_VERSION)
        if not 0 < len(info.name) <= MAX_NAME_LENGTH or not info.name.isprintable():
            raise ConfigError(
                f"pool name {info.name!r} must be 1 to {MAX_NAME_LENGTH} printable characters:"
                " set --name"
            )
        require_process_nonce(info)
        if info.num_blocks < 1:
            raise ConfigError(
                f"pool {info.name!r} has num_blocks {info.num_blocks}: it must be at least 1"
            )
        if model is not None:
            _require_equal(info, "model_digest", info.model_digest, model.model_digest)
            _require_equal(info, "layout", info.layout, model.layout)
        holder = next((one for one in self.members.values() if one.info.name == info.name), None)
        if holder is not None:
            require_free_name(info, holder.info, free_in=holder.heard_at + self._silence - now)
        return holder

    def add_pool(self, info: PoolJoinInfo, incarnation: Incarnation, now: float) -> None:
        self.members[incarnation] = PoolMember(info, incarnation, joined_at=now, heard_at=now)

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(pool.info.host_id for pool in self.members.values())

    def find_expired(self, now: float) -> list[tuple[PoolMember, NodeLost]]:
        """Return the silent pools."""
        return [
            (one, NodeLost(f"pool {one.info.name} was silent for {now - one.heard_at:.1f} s"))
            for one in self.members.values()
            if now - one.heard_at >= self._silence
        ]

    def next_silence_at(self) -> float | None:
        """Return when the first pool would count as silent."""
        return min((one.heard_at + self._silence for one in self.members.values()), default=None)


def _require_equal(info: PoolJoinInfo, field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise ConfigError(
            f"pool {info.name!r} has {field} {theirs!r}, the cluster has {ours!r}", param=field
        )
