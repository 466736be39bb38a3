"""The prefill:decode ratio: how many nodes have each role."""

import re
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.types import Role

_SPLIT = re.compile(r"(\d{1,6}):(\d{1,6})", re.ASCII)
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of nodes."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode


def parse_split(text: str) -> Split:
    """`P:D`. Raises InvalidRequest."""
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"ratio {text[:64]!r} is not P:D, as in 3:1", param="ratio")
    return Split(int(match[1]), int(match[2]))


def possible_splits(nodes: int, mode: str) -> list[Split]:
    """Of so many nodes in this mode (`--mode`): decode is needed in every one, prefill in `disaggregated`, and of no
    use in `colocated`."""
    if mode == "colocated":
        return [Split(0, nodes)] if nodes else []
    return [Split(prefill, nodes - prefill) for prefill in range(mode == "disaggregated", nodes)]


def told(splits: list[Split]) -> str:
    """In words: all of them, or the ends of a long list."""
    named = [str(split) for split in splits]
    if len(named) > _MOST_NAMED:
        named = [*named[:2], "...", named[-1]]
    return ", ".join(named) or "none"
