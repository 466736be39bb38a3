"""The fields that completions and chat completions share."""

import re
from typing import Annotated, Any

import msgspec

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.body_decoder import RequestBody, truncate_text
from coordinator.frontend.request import check_client_request_id

_TOKEN_ID = re.compile(r"\d{1,9}")

TOP_K_OFF = -1  # "no top-k" in vLLM and SGLang; 0 in Baton


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no padding is ever added


class CommonRequestBody(RequestBody, frozen=True, kw_only=True):
    """The common fields. `user`, `session_id` and the like have no effect."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    first_choice: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    rid: str | None = None
    best_of: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def get_client_request_id(self, header: str | None) -> str | None:
        """Return the client's own request id, from the header or else the body.

        Raises InvalidRequest.
        """
        if header is not None:
            return header
        if self.request_id is not None:
            return check_client_request_id(self.request_id, "request_id")
        return check_client_request_id(self.rid, "rid")

    def common_request_fields(self) -> dict[str, Any]:
        """Return these fields as arguments of `GenerationRequest`. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is given, but stream is not true", param="stream_options"
            )
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            raise InvalidRequest(
                f"best_of is {self.best_of}: not available, it must be null or n ({n})",
                param="best_of",
            )
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": 0 if self.top_k == TOP_K_OFF else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or (),
            "stop_token_ids": self.stop_token_ids or (),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _parse_logit_bias(self.logit_bias or {}),
            "n": n,
            "first_choice": self.first_choice or 0,
            "priority": self.priority or 0,
        }


def _parse_logit_bias(logit_bias: dict[str, float]) -> list[tuple[int, float]]:
    """Parse the keys, which are token ids. Raises InvalidRequest."""
    biases: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if not _TOKEN_ID.fullmatch(key) or not key.isascii():
            raise InvalidRequest(
                f"logit_bias has the key {truncate_text(key)!r}: keys are token ids",
                param="logit_bias",
            )
        if int(key) in biases:
            raise InvalidRequest(f"logit_bias has token id {int(key)} twice", param="logit_bias")
        biases[int(key)] = bias
    return list(biases.items())
