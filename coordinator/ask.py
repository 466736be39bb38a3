"""The one translation from what a client sent, over either front door, to a `Submission`.

HTTP and gRPC each turn their wire format into an `Ask` and know nothing of defaults, bounds or tokenizing; so the two
cannot drift apart.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton import limits
from baton.errors import InvalidRequest
from baton.limits import ModelBounds
from baton.types import SamplingParams
from coordinator.generation import Submission

Value = TypeVar("Value")

MAX_CLIENT_ID = 128  # characters of a client's own request id


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it was worded: None is "not given". `timeout` is the seconds that the client is willing to wait."""

    prompt: str | Sequence[int] | None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Sequence[int] = ()
    timeout: float | None = None
    client_id: str | None = None


def to_submission(ask: Ask, prompt: tuple[int, ...], timeout: float, bounds: ModelBounds) -> Submission:
    """`prompt` is the tokenized prompt, `timeout` the seconds left. Raises InvalidRequest or TooLong."""
    limits.check_prompt(prompt, bounds)
    room = bounds.max_context - len(prompt)
    sampling = SamplingParams(
        max_tokens=min(limits.DEFAULT_MAX_TOKENS, room) if ask.max_tokens is None else ask.max_tokens,
        temperature=_or(ask.temperature, 1.0),
        top_k=_or(ask.top_k, 0),
        top_p=_or(ask.top_p, 1.0),
        seed=secrets.randbits(63) if ask.seed is None else ask.seed,
        min_tokens=_or(ask.min_tokens, 0),
        ignore_eos=_or(ask.ignore_eos, False),
        stop_token_ids=tuple(ask.stop_token_ids),
    )
    limits.check_sampling(sampling, len(prompt), bounds)
    return Submission(prompt=prompt, sampling=sampling, timeout=timeout)


def check_timeout(seconds: float, name: str) -> float:
    """Raises InvalidRequest unless `seconds` is a positive, finite number."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(f"{name} is {seconds}: it must be a positive number of seconds", param=name)
    return seconds


def check_client_id(text: str | None) -> str | None:
    """A client's own request id is echoed and logged, never used as a key. Raises InvalidRequest."""
    if text is None or (0 < len(text) <= MAX_CLIENT_ID and text.isascii() and text.isprintable()):
        return text
    raise InvalidRequest(f"x-request-id must be 1 to {MAX_CLIENT_ID} printable ASCII characters", param="x-request-id")


def _or(given: Value | None, default: Value) -> Value:
    return default if given is None else given
