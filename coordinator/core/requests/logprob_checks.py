"""What a node must say of its tokens' probabilities when a request asks for them. Anything else is
a doubt.

Prompt scores stay with their attempt until all of them are there, then with the request until its
first token. So the coordinator holds at most one score for each prompt token of a request that was
placed and has shown nothing, and a score holds at most `baton.limits.MAX_LOGPROBS` tokens.
"""

from baton.errors import StaleMessage
from baton.types import TokenLogprobs
from coordinator.core.common.messages import PromptLogprobsReport
from coordinator.core.requests.record import Attempt, RequestRecord


def required_top_logprobs(wanted: int | None, vocab_size: int) -> int | None:
    """How many of the most likely tokens a score must name, None where no score is asked for."""
    return None if wanted is None else min(wanted, vocab_size)


def has_required_logprobs(score: TokenLogprobs | None, width: int) -> bool:
    return score is not None and len(score.top_logprobs) == width


def collect_prompt_logprobs(
    record: RequestRecord, attempt: Attempt, message: PromptLogprobsReport, vocab_size: int
) -> None:
    """The next scores of a prompt that awaits some. Raises Stale unless they continue what has come
    exactly."""
    expected, last = len(attempt.prompt_logprobs) + 1, len(record.request.prompt_token_ids)
    end = message.first_index + len(message.logprobs)
    if message.first_index != expected or not expected < end <= last:
        raise StaleMessage(
            f"prompt scores {message.first_index} to {end} have come, expected were some from {expected}, up to {last}"
        )
    names = required_top_logprobs(record.request.sampling.prompt_logprobs, vocab_size)
    if names is None or not all(has_required_logprobs(score, names) for score in message.logprobs):
        raise StaleMessage(f"a prompt score does not name {names} tokens")
    attempt.prompt_logprobs += message.logprobs
    if end == last:
        record.prompt_logprobs = tuple(attempt.prompt_logprobs)
        attempt.prompt_logprobs.clear()
