"""The prefill:decode ratio: how many nodes have each role."""

import re
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.types import Role

_SPLIT_PATTERN = re.compile(r"(\d{1,6}):(\d{1,6})", re.ASCII)
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class RoleSplit:
    """Numbers of nodes."""

    prefill_nodes: int
    decode_nodes: int

    def __str__(self) -> str:
        return f"{self.prefill_nodes}:{self.decode_nodes}"

    def node_count(self, role: Role) -> int:
        return self.prefill_nodes if role is Role.PREFILL else self.decode_nodes

    @property
    def total_nodes(self) -> int:
        return self.prefill_nodes + self.decode_nodes


def parse_split(text: str) -> RoleSplit:
    """`P:D`. Raises InvalidRequest."""
    match = _SPLIT_PATTERN.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"ratio {text[:64]!r} is not P:D, as in 3:1", param="ratio")
    return RoleSplit(int(match[1]), int(match[2]))


def list_possible_splits(nodes: int, mode: str) -> list[RoleSplit]:
    """Of so many nodes in this mode (`--mode`): decode is needed in every one, prefill in
    `disaggregated`, and of no use in `colocated`."""
    if mode == "colocated":
        return [RoleSplit(0, nodes)] if nodes else []
    return [
        RoleSplit(prefill, nodes - prefill) for prefill in range(mode == "disaggregated", nodes)
    ]


def format_splits(splits: list[RoleSplit]) -> str:
    """In words: all of them, or the ends of a long list."""
    named = [str(split) for split in splits]
    if len(named) > _MAX_LISTED:
        named = [*named[:2], "...", named[-1]]
    return ", ".join(named) or "none"
