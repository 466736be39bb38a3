"""Scores of continuations: whether they are Python, and whether they repeat themselves."""

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.text.source_files import parse_python

REPEAT_THRESHOLD = 3  # a continuation with so many equal lines repeats itself


@dataclass(frozen=True, slots=True)
class Continuation:
    """An opening and what the model wrote after it."""

    opening: str
    text: str  # what follows the opening
    is_ended: bool  # by the model's end token, not by the limit of length

    @property
    def whole_lines(self) -> str:
        """Opening and text, up to the last line that is known to be complete."""
        text = self.opening + self.text
        return text if self.is_ended else text[: text.rfind("\n") + 1]

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
        line_counts = Counter(line.strip() for line in self.new_lines if re.search(r"\w", line))
        return max(line_counts.values(), default=0) >= REPEAT_THRESHOLD


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
        python_share=sum(continuation.is_python for continuation in continuations) / count,
        ended_share=sum(continuation.is_ended for continuation in continuations) / count,
        repeat_share=sum(continuation.has_repetition for continuation in continuations) / count,
        median_lines=statistics.median(
            len(continuation.new_lines) for continuation in continuations
        ),
    )
