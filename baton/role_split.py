"""The prefill:decode ratio: how many nodes have each role."""

import re
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.types import Role

_SPLIT_PATTERN = re.compile(r"(\d{1,6}):(\d{1,6})", re.ASCII)
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class RoleSplit:
    """Numbers of prefill and decode nodes, written P:D."""

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
    """Parse `P:D`. Raises InvalidRequest."""
    match = _SPLIT_PATTERN.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"ratio {text[:64]!r} is not P:D, as in 3:1", param="ratio")
    return RoleSplit(int(match[1]), int(match[2]))


def list_possible_splits(nodes: int, mode: str) -> list[RoleSplit]:
    """Return the splits of `nodes` nodes that the mode (`--mode`) allows.

    Every mode needs a decode node, `disaggregated` a prefill node as well, and `colocated` has
    none.
    """
    if mode == "colocated":
        return [RoleSplit(0, nodes)] if nodes else []
    return [
        RoleSplit(prefill, nodes - prefill) for prefill in range(mode == "disaggregated", nodes)
    ]


def format_splits(splits: list[RoleSplit]) -> str:
    """Format splits for a message: all of them, or the first and last of a long list."""
    texts = [str(split) for split in splits]
    if len(texts) > _MAX_LISTED:
        texts = [*texts[:2], "...", texts[-1]]
    return ", ".join(texts) or "none"
