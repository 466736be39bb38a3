"""Requests with new ids, as front ends make them."""

from baton.types import Request, RequestId, SamplingParams, mint_id
from coordinator.frontend.request import expand_choices


def make_request(prompt: tuple[int, ...], sampling: SamplingParams, timeout: float) -> Request:
    return Request(RequestId(mint_id()), prompt, sampling, timeout)


def make_choices(
    prompt: tuple[int, ...], sampling: SamplingParams, timeout: float, *, count: int
) -> list[Request]:
    return list(expand_choices(make_request(prompt, sampling, timeout), count))
