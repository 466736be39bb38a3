"""What a client asked for: its checks, and its conversion to `Request`s with defaults and bounds.

HTTP and gRPC each turn their wire format into a `GenerationRequest` and know nothing of defaults,
bounds or tokenizing, so that the two cannot drift apart.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from baton import limits
from baton.errors import InvalidRequest, RequestRejected
from baton.limits import ModelBounds
from baton.models.generation_defaults import GenerationDefaults
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from baton.types import (
    DEFAULT_PRINCIPAL,
    GrammarKind,
    Principal,
    Request,
    RequestId,
    SamplingParams,
    StructuredOutput,
    mint_id,
)
from coordinator.core.common.counters import DEFAULT_TENANT_CLASS
from coordinator.frontend.tool_use import ToolUse
from coordinator.text.chat_template import ChatPrompt

Value = TypeVar("Value")
Prompt = str | Sequence[int]

MAX_CLIENT_REQUEST_ID_CHARS = 128

_log = log.get_logger("front")
_limited = RateLimitedLogger()


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """How many tokens of a prompt are kept, and at which end."""

    max_tokens: int | None  # None: as many as leave room for the output
    keeps_end: bool = True

    def truncate_prompt(
        self, prompt: tuple[int, ...], output_tokens: int, bounds: ModelBounds
    ) -> tuple[int, ...]:
        """`output_tokens` is the room that the output needs."""
        room = max(bounds.max_context - output_tokens, 1)
        kept = room if self.max_tokens is None else self.max_tokens
        return prompt[-kept:] if self.keeps_end else prompt[:kept]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the client sent it: None means "not given"."""

    prompts: Sequence[Prompt] | ChatPrompt | None
    model: str | None = None
    max_tokens: int | None = None  # 0 only with `echo`
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
    logprobs: int | None = None  # of the output, and with `echo` of the prompt
    echo: bool = False
    prompt_logprobs: int | None = None  # of the prompt, apart from its echo
    truncation: PromptTruncation | None = None  # None: a prompt that is too long is an error
    stop: Sequence[str] = ()
    n: int = 1
    structured_output: StructuredOutput | None = None  # the grammar that each choice obeys
    first_choice: int = 0  # index of the first choice
    timeout_seconds: float | None = None  # how long the client is willing to wait
    client_request_id: str | None = None
    priority: int = 0  # as the body asks for it
    principal: Principal = DEFAULT_PRINCIPAL  # as the caller's key allows it
    cache_salt: bytes = b""  # of the caller's tenant
    tool_use: ToolUse | None = None
    has_parsed_output: bool = False  # tell reasoning and tool calls in the output from content
    separates_reasoning: bool = True  # if not, with `has_parsed_output`, reasoning is content
    # The protocol's own names of fields, where they differ, for error messages.
    param_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_fixed_form(self) -> bool:
        """Whether the whole output obeys a schema or pattern, so that it has no reasoning."""
        return self.structured_output is not None and self.structured_output.kind in (
            GrammarKind.JSON,
            GrammarKind.REGEX,
            GrammarKind.CHOICE,
        )

    @property
    def scored_prompt_alternatives(self) -> int | None:
        """How many of the likeliest tokens are computed for each prompt token; None: none."""
        counts = (self.logprobs if self.echo else None, self.prompt_logprobs)
        return max((count for count in counts if count is not None), default=None)

    @property
    def is_echo_only(self) -> bool:
        """Whether only the prompt is returned. One token is generated, to compute the prompt."""
        return self.echo and self.max_tokens == 0

    @property
    def reserved_output_tokens(self) -> int:
        """How many tokens of output truncation leaves room for."""
        if self.max_tokens is not None:
            return max(self.max_tokens, 1)
        return max(limits.DEFAULT_MAX_TOKENS, self.min_tokens or 0)


def check_request(request: GenerationRequest) -> None:
    """Check what can be checked before the prompts are tokenized. Raises InvalidRequest."""
    if request.prompts is None:
        raise InvalidRequest("prompt is missing: it must be text or token ids", param="prompt")
    limits.check_choices(request.n, request.first_choice, count_prompts(request))
    for name in ("stop", "stop_token_ids", "logit_bias"):
        limits.check_entry_count(name, len(getattr(request, name)))
    if isinstance(request.prompts, ChatPrompt):
        limits.check_message_count(len(request.prompts.messages))
        limits.check_entry_count("chat_template_kwargs", len(request.prompts.template_kwargs))
    else:
        for number, prompt in enumerate(request.prompts):
            name = f"prompt[{number}]" if len(request.prompts) > 1 else "prompt"
            if not prompt:  # also text, to which a tokenizer would add special tokens
                raise InvalidRequest(
                    f"{name} is empty: it needs at least one token", param="prompt"
                )
    limits.check_stop_strings(request.stop)
    limits.check_logprobs(request.logprobs, "logprobs")
    limits.check_logprobs(request.prompt_logprobs, "prompt_logprobs")


def count_prompts(request: GenerationRequest) -> int:
    return (
        1
        if isinstance(request.prompts, ChatPrompt) or request.prompts is None
        else len(request.prompts)
    )


def build_request(
    request: GenerationRequest,
    prompt: tuple[int, ...],
    timeout: float,
    bounds: ModelBounds,
    defaults: GenerationDefaults,
) -> Request:
    """Build the first choice for one tokenized prompt.

    `timeout` is the time left, in seconds. `defaults` are the model's own, for what the request
    does not give. Raises InvalidRequest or ContextLengthExceeded.
    """
    limits.check_prompt(prompt, bounds)
    sampling = SamplingParams(
        max_tokens=_max_tokens(request, bounds.max_output_tokens(len(prompt)), defaults),
        temperature=_first_given(request.temperature, defaults.temperature, 1.0),
        top_k=_default_if_none(request.top_k, min(defaults.top_k or 0, bounds.vocab_size)),
        top_p=_first_given(request.top_p, defaults.top_p, 1.0),
        min_p=_first_given(request.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        min_tokens=_default_if_none(request.min_tokens, 0),
        ignore_eos=_default_if_none(request.ignore_eos, False),
        stop_token_ids=tuple(request.stop_token_ids),
        presence_penalty=_default_if_none(request.presence_penalty, 0.0),
        frequency_penalty=_default_if_none(request.frequency_penalty, 0.0),
        repetition_penalty=_first_given(
            request.repetition_penalty, defaults.repetition_penalty, 1.0
        ),
        logit_bias=tuple(request.logit_bias),
        logprobs=request.logprobs,
        prompt_logprobs=request.scored_prompt_alternatives,
        structured_output=request.structured_output,
    )
    limits.check_sampling(sampling, len(prompt), bounds)
    return Request(
        id=RequestId(mint_id()),
        prompt_token_ids=prompt,
        sampling=sampling,
        timeout_seconds=timeout,
        cache_salt=request.cache_salt,
        choice_index=request.first_choice,
        principal=request.principal,
    )


def expand_choices(first: Request, n: int) -> Iterator[Request]:
    """Yield all `n` choices of a prompt; the others follow the first, so it is computed once.

    Only the first asks for the prompt's logprobs, which are equal for all.
    """
    yield first
    sampling = replace(first.sampling, prompt_logprobs=None)
    for number in range(1, n):
        yield replace(
            first,
            id=RequestId(mint_id()),
            sampling=sampling,
            choice_index=first.choice_index + number,
            leader_id=first.id,
        )


def _max_tokens(request: GenerationRequest, room: int, defaults: GenerationDefaults) -> int:
    if request.is_echo_only:
        return 1
    if request.max_tokens is not None:
        return request.max_tokens
    default = (
        _default_if_none(defaults.max_new_tokens, room)
        if isinstance(request.prompts, ChatPrompt)
        else limits.DEFAULT_MAX_TOKENS
    )
    return min(default, room)


@contextmanager
def rename_error_params(param_names: Mapping[str, str]) -> Iterator[None]:
    """Make a RequestRejected of the block name its field as the client knows it."""
    try:
        yield
    except RequestRejected as error:
        name = param_names.get(error.param or "")
        if name is None:
            raise
        message = error.message.replace(error.param or "", name, 1)
        raise type(error)(
            message, param=name.partition("[")[0], retry_after=error.retry_after
        ) from None


class RejectionCounter:
    """Counts and logs requests that a front end rejects before it submits them.

    The brain counts what it rejects itself. Log lines are rate limited.
    """

    def __init__(self, count: Callable[[RequestRejected, str], None]) -> None:
        """`count(error, tenant_class)` adds one to baton_rejected_total."""
        self._count = count

    @contextmanager
    def count_rejections(self, tenant_class: str = DEFAULT_TENANT_CLASS) -> Iterator[None]:
        """Count a RequestRejected that the block raises, under the caller's class if known."""
        try:
            yield
        except RequestRejected as error:
            self._count(error, tenant_class)
            # neither message nor field name: both may quote the client
            _limited.log_event(
                _log.info, "request rejected", rate_limit_key=error.code, code=error.code
            )
            raise


def check_timeout(seconds: float, name: str) -> float:
    """Raises InvalidRequest unless `seconds` is a positive, finite number."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(
            f"{name} is {seconds}: it must be a positive number of seconds", param=name
        )
    return seconds


def check_client_request_id(text: str | None, name: str = "x-request-id") -> str | None:
    """Check a client's own request id, which is echoed and logged but never used as a key.

    `name` is the header or field that has it. Raises InvalidRequest.
    """
    if text is None or (
        0 < len(text) <= MAX_CLIENT_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
    ):
        return text
    raise InvalidRequest(
        f"{name} must be 1 to {MAX_CLIENT_REQUEST_ID_CHARS} printable ASCII characters", param=name
    )


def _default_if_none(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _first_given(value: Value | None, model_default: Value | None, default: Value) -> Value:
    return _default_if_none(value, _default_if_none(model_default, default))
