"""Is a continuation Python, and more than nothing said again and again?"""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo_model.sources import parse

OFTEN = 3  # times that a line stands in a continuation which repeats itself


@dataclass(frozen=True, slots=True)
class Continuation:
    """`text` follows `opening`. `ended`: with the model's end token, not at the limit of length."""

    opening: str
    text: str
    ended: bool

    @property
    def whole_lines(self) -> str:
        """Opening and text, cut after the last line that is known to be whole: the last newline, or the end."""
        whole = self.opening + self.text
        return whole if self.ended else whole[: whole.rfind("\n") + 1]

    @property
    def new_lines(self) -> list[str]:
        """Lines with text in them that the model wrote or completed."""
        lines = self.whole_lines[len(self.opening) :].split("\n")
        return [line for line in lines if line.strip()]

    @property
    def parses(self) -> bool:
        return parse(self.whole_lines) is not None

    @property
    def repeats(self) -> bool:
        told = Counter(line.strip() for line in self.new_lines if re.search(r"\w", line))
        return max(told.values(), default=0) >= OFTEN


@dataclass(frozen=True, slots=True)
class Judgement:
    """Shares from 0 to 1."""

    count: int
    parse: float
    ended: float
    repeat: float
    median_lines: float


def judge(continuations: Sequence[Continuation]) -> Judgement:
    count = len(continuations)
    return Judgement(
        count,
        parse=sum(one.parses for one in continuations) / count,
        ended=sum(one.ended for one in continuations) / count,
        repeat=sum(one.repeats for one in continuations) / count,
        median_lines=statistics.median(len(one.new_lines) for one in continuations),
    )
