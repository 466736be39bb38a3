"""The one translation from what a client sent, over either front door, to a `Submission`.

HTTP and gRPC each turn their wire format into an `Ask` and know nothing of defaults, bounds or
tokenizing; so the two cannot drift apart.
"""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from baton import limits
from baton.errors import InvalidRequest, RequestRejected
from baton.limits import ModelBounds
from baton.models.generation_defaults import GenerationDefaults
from baton.types import DEFAULT_PRINCIPAL, Principal, SamplingParams
from coordinator.generation import Submission
from coordinator.text.chat_template import ChatPrompt

Value = TypeVar("Value")
Prompt = str | Sequence[int]

MAX_CLIENT_REQUEST_ID_CHARS = 128  # characters of a client's own request id


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as it was worded: None is "not given". `timeout_seconds` is the seconds that the
    client is willing to wait.

    `logprobs` scores the output, and with `echo` the prompt. A `max_tokens` of 0 is for `echo`
    alone. `param_names` gives this front door's own names of fields, where they differ, for what is
    said about them. `priority` is what the body asks for; `principal` and `cache_salt` are what the
    caller's key allows and makes of it."""

    prompts: Sequence[Prompt] | ChatPrompt | None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Sequence[int] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Sequence[tuple[int, float]] = ()
    logprobs: int | None = None
    echo: bool = False
    stop: Sequence[str] = ()
    n: int = 1
    first_choice: int = 0
    timeout_seconds: float | None = None
    client_request_id: str | None = None
    priority: int = 0
    principal: Principal = DEFAULT_PRINCIPAL
    cache_salt: bytes = b""
    param_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_echo_only(self) -> bool:
        """Nothing but the prompt is to be told. One token is generated, because that is what
        computes the prompt."""
        return self.echo and self.max_tokens == 0


def check_request(ask: GenerationRequest) -> None:
    """What can be said before the prompts are tokenized. Raises InvalidRequest."""
    if ask.prompts is None:
        raise InvalidRequest("prompt is missing: it must be text or token ids", param="prompt")
    limits.check_choices(ask.n, ask.first_choice, count_prompts(ask))
    for name in ("stop", "stop_token_ids", "logit_bias"):
        limits.check_entry_count(name, len(getattr(ask, name)))
    if isinstance(ask.prompts, ChatPrompt):
        limits.check_message_count(len(ask.prompts.messages))
        limits.check_entry_count("chat_template_kwargs", len(ask.prompts.template_kwargs))
    else:
        for number, prompt in enumerate(ask.prompts):
            name = f"prompt[{number}]" if len(ask.prompts) > 1 else "prompt"
            if not prompt:  # also text, around which a tokenizer would put special tokens
                raise InvalidRequest(
                    f"{name} is empty: it needs at least one token", param="prompt"
                )
    limits.check_stop_strings(ask.stop)


def count_prompts(ask: GenerationRequest) -> int:
    return 1 if isinstance(ask.prompts, ChatPrompt) or ask.prompts is None else len(ask.prompts)


def to_submission(
    ask: GenerationRequest,
    prompt: tuple[int, ...],
    timeout: float,
    bounds: ModelBounds,
    defaults: GenerationDefaults,
) -> Submission:
    """The first choice for one tokenized prompt; `timeout` is the seconds left, `defaults` the
    model's own for what the request does not say. Raises InvalidRequest or TooLong."""
    limits.check_prompt(prompt, bounds)
    sampling = SamplingParams(
        max_tokens=_max_tokens(ask, bounds.max_output_tokens(len(prompt)), defaults),
        temperature=_first_given(ask.temperature, defaults.temperature, 1.0),
        top_k=_default_if_none(ask.top_k, min(defaults.top_k or 0, bounds.vocab_size)),
        top_p=_first_given(ask.top_p, defaults.top_p, 1.0),
        min_p=_first_given(ask.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(63) if ask.seed is None else ask.seed,
        min_tokens=_default_if_none(ask.min_tokens, 0),
        ignore_eos=_default_if_none(ask.ignore_eos, False),
        stop_token_ids=tuple(ask.stop_token_ids),
        presence_penalty=_default_if_none(ask.presence_penalty, 0.0),
        frequency_penalty=_default_if_none(ask.frequency_penalty, 0.0),
        repetition_penalty=_first_given(ask.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tuple(ask.logit_bias),
        logprobs=ask.logprobs,
        prompt_logprobs=ask.logprobs if ask.echo else None,
    )
    limits.check_sampling(sampling, len(prompt), bounds)
    return Submission(
        prompt_token_ids=prompt,
        sampling=sampling,
        timeout_seconds=timeout,
        cache_salt=ask.cache_salt,
        choice_index=ask.first_choice,
        principal=ask.principal,
    )


def _max_tokens(ask: GenerationRequest, room: int, defaults: GenerationDefaults) -> int:
    if ask.is_echo_only:
        return 1
    if ask.max_tokens is not None:
        return ask.max_tokens
    usual = (
        _default_if_none(defaults.max_new_tokens, room)
        if isinstance(ask.prompts, ChatPrompt)
        else limits.DEFAULT_MAX_TOKENS
    )
    return min(usual, room)


@contextmanager
def rename_error_params(wording: Mapping[str, str]) -> Iterator[None]:
    """A refusal inside names its field as the client knows it."""
    try:
        yield
    except RequestRejected as error:
        name = wording.get(error.param or "")
        if name is None:
            raise
        message = error.message.replace(error.param or "", name, 1)
        raise type(error)(
            message, param=name.partition("[")[0], retry_after=error.retry_after
        ) from None


def check_timeout(seconds: float, name: str) -> float:
    """Raises InvalidRequest unless `seconds` is a positive, finite number."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(
            f"{name} is {seconds}: it must be a positive number of seconds", param=name
        )
    return seconds


def check_client_request_id(text: str | None, name: str = "x-request-id") -> str | None:
    """A client's own request id is echoed and logged, never used as a key. `name` is where the
    client gave it. Raises InvalidRequest."""
    if text is None or (
        0 < len(text) <= MAX_CLIENT_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
    ):
        return text
    raise InvalidRequest(
        f"{name} must be 1 to {MAX_CLIENT_REQUEST_ID_CHARS} printable ASCII characters", param=name
    )


def _default_if_none(given: Value | None, default: Value) -> Value:
    return default if given is None else given


def _first_given(given: Value | None, models: Value | None, default: Value) -> Value:
    return _default_if_none(given, _default_if_none(models, default))
