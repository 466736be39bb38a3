"""Checks that nodes send the logprobs that a request asks for; otherwise its attempt is replaced.

Prompt logprobs stay with their attempt until all have arrived, then with the request until its
first token. So the coordinator holds at most one entry for each prompt token of a placed request
that has emitted nothing, and an entry has at most `baton.limits.MAX_LOGPROBS` tokens.
"""

from baton.cluster_link.messages import PromptLogprobsReport
from baton.errors import StaleMessage
from baton.types import TokenLogprobs
from coordinator.core.requests.record import Attempt, RequestRecord


def required_top_logprobs(requested: int | None, vocab_size: int) -> int | None:
    """Return how many top tokens each entry must have, or None if no logprobs are asked for."""
    return None if requested is None else min(requested, vocab_size)


def has_required_logprobs(entry: TokenLogprobs | None, top_logprobs: int) -> bool:
    """Return whether the entry of a token has as many top logprobs as are required."""
    return entry is not None and len(entry.top_logprobs) == top_logprobs


def collect_prompt_logprobs(
    record: RequestRecord, attempt: Attempt, message: PromptLogprobsReport, vocab_size: int
) -> None:
    """Add the next logprobs of a prompt. Raises StaleMessage unless they continue the previous ones
    exactly."""
    expected, last = len(attempt.prompt_logprobs) + 1, len(record.request.prompt_token_ids)
    end = message.first_index + len(message.logprobs)
    if message.first_index != expected or not expected < end <= last:
        raise StaleMessage(
            f"prompt logprobs {message.first_index} to {end} were sent, expected were some from"
            f" {expected}, up to {last}"
        )
    top_logprobs = required_top_logprobs(record.request.sampling.prompt_logprobs, vocab_size)
    if top_logprobs is None or not all(
        has_required_logprobs(entry, top_logprobs) for entry in message.logprobs
    ):
        raise StaleMessage(f"a prompt logprob does not have {top_logprobs} tokens")
    attempt.prompt_logprobs += message.logprobs
    if end == last:
        record.prompt_logprobs = tuple(attempt.prompt_logprobs)
        attempt.prompt_logprobs.clear()
