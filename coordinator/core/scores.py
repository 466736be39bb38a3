"""What a node must say of its tokens' probabilities when a request asks for them. Anything else is a doubt.

Prompt scores stay with their attempt until all of them are there, then with the request until its first token. So the
coordinator holds at most one score for each prompt token of a request that was placed and has shown nothing, and a
score holds at most `baton.limits.MAX_LOGPROBS` tokens.
"""

from baton.errors import Stale
from baton.types import TokenScore
from coordinator.core.messages import PromptScores
from coordinator.core.record import Attempt, Record


def width(wanted: int | None, vocab_size: int) -> int | None:
    """How many of the most likely tokens a score must name, None where no score is asked for."""
    return None if wanted is None else min(wanted, vocab_size)


def is_whole(score: TokenScore | None, width: int) -> bool:
    return score is not None and len(score.top) == width


def collect(record: Record, attempt: Attempt, message: PromptScores, vocab_size: int) -> None:
    """The next scores of a prompt that awaits some. Raises Stale unless they continue what has come exactly."""
    expected, last = len(attempt.prompt_scores) + 1, len(record.request.prompt)
    end = message.first + len(message.scores)
    if message.first != expected or not expected < end <= last:
        raise Stale(
            f"prompt scores {message.first} to {end} have come, expected were some from {expected}, up to {last}"
        )
    names = width(record.request.sampling.prompt_logprobs, vocab_size)
    if names is None or not all(is_whole(score, names) for score in message.scores):
        raise Stale(f"a prompt score does not name {names} tokens")
    attempt.prompt_scores += message.scores
    if end == last:
        record.prompt_scores = tuple(attempt.prompt_scores)
        attempt.prompt_scores.clear()
