import pytest

from tools.demo_model.evaluation.continuations import Continuation, score_continuations
from tools.demo_model.evaluation.openings import OPENINGS

OPENING = "def f(x):\n"


@pytest.mark.parametrize(
    ("text", "ended", "parses"),
    [
        ("    return x\n", True, True),
        ("    return x", True, True),
        ("    return x\n    y = (", False, True),  # cut at the last whole line
        ("    return x\n    y = (", True, False),
        ("    if x:\n        re", False, False),  # a block without a body
        ("    ret", False, False),  # nothing but the opening is left
        ('    """never\n    ended\n', False, False),
    ],
)
def test_what_parses(text: str, ended: bool, parses: bool) -> None:
    assert Continuation(OPENING, text, ended).is_python is parses


def test_three_equal_lines_are_a_repetition_wherever_they_stand() -> None:
    line = "    x += 1\n"
    assert not Continuation(OPENING, line * 2, True).has_repetition
    assert Continuation(OPENING, line + "    y = 2\n" + line * 2, True).has_repetition
    assert not Continuation(
        OPENING, "    (\n    )\n    )\n    )\n", True
    ).has_repetition  # no word in it


def test_lines_of_the_opening_are_not_counted_as_written() -> None:
    continuation = Continuation("import os\n\n\ndef f(", "x):\n\n    return x\n    y", False)
    assert continuation.new_lines == ["x):", "    return x"]
    assert Continuation(OPENING, "", True).new_lines == []


def test_a_model_that_writes_nothing_is_found_out() -> None:
    judgement = score_continuations([Continuation(f"a{i} = 1\n", "", True) for i in range(4)])
    assert (judgement.python_share, judgement.median_lines) == (1.0, 0)


def test_score_shares() -> None:
    good = Continuation(OPENING, "    return x\n", True)
    bad = Continuation(OPENING, "    x = (\n" * 3, False)
    judgement = score_continuations([good, good, good, bad])
    assert (
        judgement.count,
        judgement.python_share,
        judgement.ended_share,
        judgement.repeat_share,
    ) == (4, 0.75, 0.75, 0.25)
    assert judgement.median_lines == 1


def test_openings_are_fifty_and_seldom_pass_with_nothing_written() -> None:
    assert len(set(OPENINGS)) == 50
    assert (
        score_continuations([Continuation(opening, "", False) for opening in OPENINGS]).python_share
        <= 0.25
    )
