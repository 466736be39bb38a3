"""The bounds table: every number a client can send, and what it may be. Checked by the coordinator, again by nodes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest, TooLong
from baton.types import SamplingParams

MAX_BODY_BYTES = 4 << 20
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0  # presence and frequency, either way
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0  # either way
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 16  # of one prompt
MAX_PROMPTS = 128  # of one request
MAX_ANSWERS = 256  # choices of all prompts of one request
MAX_CHOICE_NUMBER = 2**16 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256  # of one stop string
MAX_PROMPT_SCORES = 2**20  # log probabilities told of the prompts of one request: about 140 bytes each
MAX_MESSAGES = 2048  # of one conversation
MAX_TEMPLATE_ARGUMENTS = 32  # for the chat template of one conversation
MAX_TEMPLATE_NAME = 64  # characters of the name of one
MAX_TEMPLATE_TEXT = 4096  # characters of one that is a text
MAX_TEMPLATE_NUMBER = 2**53  # either way, of one that is a number
MAX_LINK_MESSAGE_BYTES = 16 << 20  # between coordinator and node: a prompt of a million tokens fits
MAX_UNSENT = 8192  # messages waiting on one internal stream before its reader is given up
LINK_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_LINK_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_LINK_MESSAGE_BYTES),
)
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
LOCAL_PREFILL_BURST = 8  # steps of a decode node whose share of prompts may be taken at once


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What the served model and the cluster's cache allow, and which model that is. Both lengths are those of one node,
    the one that can hold the longest request, or could before it left a moment ago."""

    vocab_size: int
    max_model_len: int  # prompt plus output, tokens
    cache_tokens: int  # tokens that its cache can hold
    model_digest: str = ""  # of its weights and architecture, in hex
    dtype: str = ""
    present_context: int = 0  # the longest request that the nodes which are here can hold, tokens; 0: not known

    @property
    def max_context(self) -> int:
        return min(self.max_model_len, self.cache_tokens)

    def output_room(self, prompt_tokens: int) -> int:
        """Tokens of output that fit behind such a prompt now; if that is none, those that usually do."""
        now = self.present_context - prompt_tokens
        return now if now > 0 else self.max_context - prompt_tokens


def check_prompt(prompt: tuple[int, ...], bounds: ModelBounds) -> None:
    """Raises InvalidRequest for an empty prompt or an id out of range, TooLong for one that leaves no room."""
    if not prompt:
        raise InvalidRequest("prompt is empty: it needs at least one token", param="prompt")
    worst = max(prompt)
    if min(prompt) < 0 or worst >= bounds.vocab_size:
        bad = worst if worst >= bounds.vocab_size else min(prompt)
        raise InvalidRequest(f"prompt has token id {bad}: ids are 0 to {bounds.vocab_size - 1}", param="prompt")
    if len(prompt) >= bounds.max_context:
        raise TooLong(
            f"prompt has {len(prompt)} tokens: with at least one token of output the limit is "
            f"{bounds.max_context - 1} ({_limit(bounds)})",
            param="prompt",
        )


def check_choices(n: int, first: int, prompts: int) -> None:
    """Raises InvalidRequest naming the field, the value and the bound."""
    _whole("n", n, 1, MAX_CHOICES)
    _whole("first_choice", first, 0, MAX_CHOICE_NUMBER - MAX_CHOICES)
    if not 1 <= prompts <= MAX_PROMPTS:
        raise InvalidRequest(f"prompt is a list of {prompts} prompts: it must be 1 to {MAX_PROMPTS}", param="prompt")
    if n * prompts > MAX_ANSWERS:
        raise InvalidRequest(f"n is {n} for {prompts} prompts: together at most {MAX_ANSWERS} choices", param="n")


def check_prompt_scores(tokens: int, logprobs: int) -> None:
    """`tokens` of all prompts that are to be echoed with scores. Raises InvalidRequest naming the value and the
    bound."""
    told = tokens * (1 + logprobs)
    if told > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"logprobs is {logprobs} with echo for prompts of {tokens} tokens: that is {told} log probabilities, the "
            f"limit is {MAX_PROMPT_SCORES} a request",
            param="logprobs",
        )


def check_stop(strings: Sequence[str]) -> None:
    """Raises InvalidRequest naming the value and the bound."""
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(strings)} strings: at most {MAX_STOP_STRINGS}", param="stop")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has a string of {len(string)} characters: each must have 1 to {MAX_STOP_CHARACTERS}",
                param="stop",
            )


def check_ids(field: str, ids: Sequence[int], bounds: ModelBounds) -> None:
    """Raises InvalidRequest for a token id out of range."""
    for token in ids:
        if not 0 <= token < bounds.vocab_size:
            raise InvalidRequest(f"{field} has {token}: ids are 0 to {bounds.vocab_size - 1}", param=field)


def check_length(prompt_tokens: int, max_tokens: int, bounds: ModelBounds) -> None:
    """Raises TooLong naming the values, the bound and the setting that is in the way."""
    if prompt_tokens + max_tokens > bounds.max_context:
        raise TooLong(
            f"max_tokens is {max_tokens} after a prompt of {prompt_tokens}: together the limit is "
            f"{bounds.max_context} ({_limit(bounds)})",
            param="max_tokens",
        )


def check_sampling(params: SamplingParams, prompt_tokens: int, bounds: ModelBounds) -> None:
    """Raises InvalidRequest or TooLong naming the field, the value and the bound."""
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens}: it must be at least 1", param="max_tokens")
    check_length(prompt_tokens, params.max_tokens, bounds)
    _within("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if not (math.isfinite(params.top_p) and 0.0 < params.top_p <= 1.0):
        raise InvalidRequest(f"top_p is {params.top_p}: it must be above 0 and at most 1", param="top_p")
    if not 0 <= params.top_k <= bounds.vocab_size:
        raise InvalidRequest(f"top_k is {params.top_k}: it must be 0 (off) to {bounds.vocab_size}", param="top_k")
    if not -MAX_SEED - 1 <= params.seed <= MAX_SEED:
        raise InvalidRequest(f"seed is {params.seed}: it must fit 64 bits", param="seed")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}: it must be 0 to max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(params.stop_token_ids)} ids: at most {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    check_ids("stop_token_ids", params.stop_token_ids, bounds)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if not 0.0 < params.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty is {params.repetition_penalty}: it must be above 0 and at most "
            f"{MAX_REPETITION_PENALTY:g}",
            param="repetition_penalty",
        )
    _check_bias(params, bounds)
    for field in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, field)
        if wanted is not None:
            _whole(field, wanted, 0, MAX_LOGPROBS)


def _check_bias(params: SamplingParams, bounds: ModelBounds) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(params.logit_bias)} entries: at most {MAX_LOGIT_BIASES}", param="logit_bias"
        )
    check_ids("logit_bias", [token for token, _ in params.logit_bias], bounds)
    for _, bias in params.logit_bias:
        _within("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _whole(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}: it must be {low} to {high}", param=field)


def _within(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{field} is {value}: it must be {low:g} to {high:g}", param=field)


def _limit(bounds: ModelBounds) -> str:
    if bounds.cache_tokens < bounds.max_model_len:
        return f"the cache holds {bounds.cache_tokens} tokens: raise --kv-memory"
    return "raise --max-model-len if the model allows it"
