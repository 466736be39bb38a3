"""Is a continuation Python, and more than nothing said again and again?"""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo_model.corpus.source_files import parse_python

REPEAT_THRESHOLD = 3  # times that a line stands in a continuation which repeats itself


@dataclass(frozen=True, slots=True)
class Continuation:
    """`text` follows `opening`. `is_ended`: with the model's end token, not at the limit of
    length."""

    opening: str
    text: str
    is_ended: bool

    @property
    def whole_lines(self) -> str:
        """Opening and text, cut after the last line that is known to be whole: the last newline, or
        the end."""
        whole = self.opening + self.text
        return whole if self.is_ended else whole[: whole.rfind("\n") + 1]

    @property
    def new_lines(self) -> list[str]:
        """Lines with text in them that the model wrote or completed."""
        lines = self.whole_lines[len(self.opening) :].split("\n")
        return [line for line in lines if line.strip()]

    @property
    def is_python(self) -> bool:
        return parse_python(self.whole_lines) is not None

    @property
    def has_repetition(self) -> bool:
        told = Counter(line.strip() for line in self.new_lines if re.search(r"\w", line))
        return max(told.values(), default=0) >= REPEAT_THRESHOLD


@dataclass(frozen=True, slots=True)
class ContinuationScores:
    """Shares from 0 to 1."""

    count: int
    python_share: float
    ended_share: float
    repeat_share: float
    median_lines: float


def score_continuations(continuations: Sequence[Continuation]) -> ContinuationScores:
    count = len(continuations)
    return ContinuationScores(
        count,
        python_share=sum(one.is_python for one in continuations) / count,
        ended_share=sum(one.is_ended for one in continuations) / count,
        repeat_share=sum(one.has_repetition for one in continuations) / count,
        median_lines=statistics.median(len(one.new_lines) for one in continuations),
    )
