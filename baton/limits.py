"""Bounds of every value that a client can send, and the functions that check them.

The coordinator checks a request before it allocates anything for it, and nodes check it again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ContextLengthExceeded, InvalidRequest
from baton.types import SamplingParams

MAX_BODY_BYTES = 4 << 20
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**63 - 1
MAX_PENALTY = 2.0  # absolute value of presence and frequency penalty
# A smaller one turns logits of healthy models into infinity.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGIT_BIAS = 100.0  # absolute value
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 16  # of one prompt
MAX_PROMPTS = 128  # of one request
MAX_TOTAL_CHOICES = 256  # choices of all prompts of one request
MAX_CHOICE_INDEX = 2**16 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
# Log probabilities of prompt tokens in one response: about 140 bytes each.
MAX_PROMPT_LOGPROBS = 2**20
MAX_GRAMMAR_BYTES = 128 << 10  # of the text of a StructuredOutput, in UTF-8
MAX_CHAT_MESSAGES = 2048  # of one conversation
MAX_TEMPLATE_ARGUMENTS = 32  # entries of chat_template_kwargs
MAX_TEMPLATE_KEY_CHARACTERS = 64
MAX_TEMPLATE_STRING_CHARACTERS = 4096
MAX_TEMPLATE_NUMBER = 2**53  # absolute value
MAX_TOOLS = 128  # functions of one request
MAX_TOOL_NAME_CHARACTERS = 128
MAX_TOOL_BYTES = 256 << 10  # JSON of all tools of one request
MAX_TOOL_DEPTH = 64  # objects and arrays in one another, in the schema or arguments of a function
MAX_TOOL_CALLS = 128  # of one message
MAX_TOOL_ARGUMENT_BYTES = 1 << 20  # JSON texts of the arguments of all calls of one conversation
MAX_JSON_KEYS = 2**15  # members of all objects of one JSON body
MAX_JSON_STRINGS = 2**16  # strings and keys of one JSON body
MAX_JSON_CONTAINERS = 2**15  # objects and arrays of one JSON body
MAX_JSON_VALUES = 2**20  # values of one JSON body: a prompt of a million tokens fits
MAX_GRPC_FIELDS = 2**13  # fields of one gRPC request and the messages in it
# Tokens of one /tokenize or /detokenize call, where the model's context is shorter than that.
MAX_TOKENIZE_TOKENS = 2**18
# Texts that wait for the tokenizer or are in it: those of at most 64 KiB, and longer ones.
MAX_PENDING_SHORT_TEXT_BYTES = 16 << 20
MAX_PENDING_LONG_TEXT_BYTES = 48 << 20
MAX_SMALL_BODY_BYTES = 64 << 10  # a body of up to this size counts as small
MAX_CONCURRENT_SMALL_BODIES = 1024  # small bodies that arrive at once
MAX_CONCURRENT_LARGE_BODY_BYTES = 128 << 20  # bytes of larger bodies that arrive at once
# gRPC requests that arrive at once. Their sizes are not known in advance.
MAX_CONCURRENT_GRPC_BODIES = 64
MAX_GRPC_BODIES_PER_CONNECTION = 8
BODY_TIMEOUT_SECONDS = 30.0  # from the head of a request to the end of its body
MAX_LINK_MESSAGE_BYTES = 16 << 20  # between coordinator and node: a prompt of a million tokens fits
MAX_UNSENT_MESSAGES = 8192  # queued on one internal stream; beyond that its reader is too slow
MAX_DESCRIPTORS = 1 << 16  # open files that a process counts on, also if it may open more
MAX_AUTO_NUM_SEQS = 256  # most sequences that --max-num-seqs auto gives a node
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
# Steps of a decode node whose shares of prefill tokens may be used up in one step.
LOCAL_PREFILL_BURST_STEPS = 8


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What the served model and the cluster's cache allow.

    `max_model_len` and `cache_tokens` are those of the node that can hold the longest request, also
    if it has just left the cluster.
    """

    vocab_size: int
    max_model_len: int  # prompt plus output, in tokens
    cache_tokens: int  # tokens that the node's cache can hold
    model_digest: str = ""  # of weights and architecture, in hex
    dtype: str = ""
    quantization: str = ""
    # Tokens of the longest request that the present nodes can hold; 0 if that is not known.
    current_max_context: int = 0

    @property
    def max_context(self) -> int:
        """The largest number of tokens of prompt plus output."""
        return min(self.max_model_len, self.cache_tokens)

    def max_output_tokens(self, prompt_tokens: int) -> int:
        """The largest output in tokens after a prompt of this length.

        It is that of the present nodes if they can hold the prompt.
        """
        present_room = self.current_max_context - prompt_tokens
        return present_room if present_room > 0 else self.max_context - prompt_tokens


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The largest number of tokens of one text, checked before and while it is tokenized."""

    max_tokens: int
    reason: str  # of the limit, for the error message

    def check_byte_count(self, size: int, longest_token: int | None) -> None:
        """Raise ContextLengthExceeded if `size` bytes exceed the limit in any tokenization.

        `longest_token` is in bytes, or None if a token may stand for text of any length.
        """
        if longest_token is not None and size > self.max_tokens * longest_token:
            raise ContextLengthExceeded(
                f"prompt has {size} bytes of text: no token has more than {longest_token}, "
                f"and the limit is {self.max_tokens} tokens ({self.reason})",
                param="prompt",
            )

    def check_token_count(self, tokens: int) -> None:
        """Raise ContextLengthExceeded for more than `max_tokens` tokens."""
        if tokens > self.max_tokens:
            raise self.length_exceeded_error(tokens)

    def length_exceeded_error(self, tokens: int, more: str = "") -> ContextLengthExceeded:
        """Build the error. `more` is "more than " if counting stopped before the end."""
        return ContextLengthExceeded(
            f"prompt has {more}{tokens} tokens: the limit is {self.max_tokens} ({self.reason})",
            param="prompt",
        )


def get_prompt_limit(bounds: ModelBounds) -> TextLimit:
    """Return the limit of a prompt, which leaves room for one output token."""
    return TextLimit(bounds.max_context - 1, _limit_reason(bounds))


def get_tokenize_limit(bounds: ModelBounds) -> TextLimit:
    """Return the limit of one /tokenize or /detokenize call, which is at least the context."""
    if bounds.max_context >= MAX_TOKENIZE_TOKENS:
        return TextLimit(bounds.max_context, _limit_reason(bounds))
    return TextLimit(MAX_TOKENIZE_TOKENS, "of one call")


def check_prompt_length(tokens: int, bounds: ModelBounds) -> None:
    """Raise ContextLengthExceeded for a prompt that leaves no room for output."""
    if tokens >= bounds.max_context:
        raise ContextLengthExceeded(
            f"prompt has {tokens} tokens: with at least one token of output the limit is "
            f"{bounds.max_context - 1} ({_limit_reason(bounds)})",
            param="prompt",
        )


def check_prompt(prompt: tuple[int, ...], bounds: ModelBounds) -> None:
    """Check the token ids and length of a prompt.

    Raises InvalidRequest for an empty prompt or an id out of range, and ContextLengthExceeded for a
    prompt that leaves no room for output.
    """
    if not prompt:
        raise InvalidRequest("prompt is empty: it needs at least one token", param="prompt")
    check_prompt_length(len(prompt), bounds)
    worst = max(prompt)
    if min(prompt) < 0 or worst >= bounds.vocab_size:
        bad = worst if worst >= bounds.vocab_size else min(prompt)
        raise InvalidRequest(
            f"prompt has token id {bad}: ids are 0 to {bounds.vocab_size - 1}", param="prompt"
        )


def check_choices(n: int, first: int, prompts: int) -> None:
    """Check the numbers of choices and prompts. Raises InvalidRequest."""
    _check_int_range("n", n, 1, MAX_CHOICES)
    _check_int_range("first_choice", first, 0, MAX_CHOICE_INDEX - MAX_CHOICES)
    check_prompt_count(prompts)
    if n * prompts > MAX_TOTAL_CHOICES:
        raise InvalidRequest(
            f"n is {n} for {prompts} prompts: together at most {MAX_TOTAL_CHOICES} choices",
            param="n",
        )


def check_logprobs(count: int | None, field: str) -> None:
    """Check how many of the likeliest tokens are to be reported. Raises InvalidRequest."""
    if count is not None:
        _check_int_range(field, count, 0, MAX_LOGPROBS)


def check_prompt_logprobs(field: str, alternatives: int, tokens: int, n: int) -> None:
    """Check how many log probabilities of prompts a response would have. Raises InvalidRequest.

    `tokens` counts the tokens of all prompts. `field` asks for `alternatives` of the likeliest
    tokens beside each of them, for each of `n` choices.
    """
    count = tokens * (1 + alternatives) * n
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field} is {alternatives} for prompts of {tokens} tokens, and n is {n}: that is "
            f"{count} log probabilities of prompts, the limit is {MAX_PROMPT_LOGPROBS} a request",
            param=field,
        )


_MAX_ENTRIES = {
    "stop": ("strings", MAX_STOP_STRINGS),
    "stop_token_ids": ("ids", MAX_STOP_TOKEN_IDS),
    "logit_bias": ("entries", MAX_LOGIT_BIAS_ENTRIES),
    "chat_template_kwargs": ("entries", MAX_TEMPLATE_ARGUMENTS),
}


def check_entry_count(field: str, count: int) -> None:
    """Check the length of a list field before its entries are read. Raises InvalidRequest."""
    unit, limit = _MAX_ENTRIES[field]
    if count > limit:
        raise InvalidRequest(f"{field} has {count} {unit}: at most {limit}", param=field)


def check_message_count(count: int) -> None:
    """Check the number of messages of a conversation. Raises InvalidRequest."""
    if not 1 <= count <= MAX_CHAT_MESSAGES:
        raise InvalidRequest(
            f"messages has {count} messages: it must have 1 to {MAX_CHAT_MESSAGES}",
            param="messages",
        )


def check_prompt_count(prompts: int) -> None:
    """Check the number of prompts of a request. Raises InvalidRequest."""
    if not 1 <= prompts <= MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt is a list of {prompts} prompts: it must be 1 to {MAX_PROMPTS}", param="prompt"
        )


def check_stop_strings(strings: Sequence[str]) -> None:
    """Check the number and the lengths of stop strings. Raises InvalidRequest."""
    check_entry_count("stop", len(strings))
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARACTERS:
            raise InvalidRequest(
                f"stop has a string of {len(string)} characters: "
                f"each must have 1 to {MAX_STOP_STRING_CHARACTERS}",
                param="stop",
            )


def check_token_ids(field: str, ids: Sequence[int], bounds: ModelBounds) -> None:
    """Raise InvalidRequest for a token id out of range."""
    if ids and not (min(ids) >= 0 and max(ids) < bounds.vocab_size):
        bad = next(token for token in ids if not 0 <= token < bounds.vocab_size)
        raise InvalidRequest(
            f"{field} has {bad}: ids are 0 to {bounds.vocab_size - 1}", param=field
        )


def check_context_length(prompt_tokens: int, max_tokens: int, bounds: ModelBounds) -> None:
    """Raise ContextLengthExceeded if prompt and output exceed the context or the cache."""
    if prompt_tokens + max_tokens > bounds.max_context:
        raise ContextLengthExceeded(
            f"max_tokens is {max_tokens} after a prompt of {prompt_tokens}: together the limit is "
            f"{bounds.max_context} ({_limit_reason(bounds)})",
            param="max_tokens",
        )


def check_grammar_size(text: str) -> None:
    """Check the length of a grammar before it is read. Raises InvalidRequest."""
    size = len(text.encode(errors="surrogatepass")) if len(text) <= MAX_GRAMMAR_BYTES else len(text)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"structured_output has {size} bytes: at most {MAX_GRAMMAR_BYTES}",
            param="structured_output",
        )


def check_sampling(params: SamplingParams, prompt_tokens: int, bounds: ModelBounds) -> None:
    """Check all sampling parameters. Raises InvalidRequest or ContextLengthExceeded."""
    if params.max_tokens < 1:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens}: it must be at least 1", param="max_tokens"
        )
    check_context_length(prompt_tokens, params.max_tokens, bounds)
    _check_float_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if not (math.isfinite(params.top_p) and 0.0 < params.top_p <= 1.0):
        raise InvalidRequest(
            f"top_p is {params.top_p}: it must be above 0 and at most 1", param="top_p"
        )
    if not 0 <= params.top_k <= bounds.vocab_size:
        raise InvalidRequest(
            f"top_k is {params.top_k}: it must be 0 (off) to {bounds.vocab_size}", param="top_k"
        )
    if not -MAX_SEED - 1 <= params.seed <= MAX_SEED:
        raise InvalidRequest(f"seed is {params.seed}: it must fit 64 bits", param="seed")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}: it must be 0 to max_tokens ({params.max_tokens})",
            param="min_tokens",
        )
    check_entry_count("stop_token_ids", len(params.stop_token_ids))
    check_token_ids("stop_token_ids", params.stop_token_ids, bounds)
    _check_float_range("min_p", params.min_p, 0.0, 1.0)
    _check_float_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_float_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_float_range(
        "repetition_penalty",
        params.repetition_penalty,
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    )
    _check_logit_bias(params, bounds)
    for field in ("logprobs", "prompt_logprobs"):
        check_logprobs(getattr(params, field), field)
    if params.structured_output is not None:
        check_grammar_size(params.structured_output.text)


def _check_logit_bias(params: SamplingParams, bounds: ModelBounds) -> None:
    check_entry_count("logit_bias", len(params.logit_bias))
    check_token_ids("logit_bias", [token for token, _ in params.logit_bias], bounds)
    for _, bias in params.logit_bias:
        _check_float_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_int_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} is {value}: it must be {low} to {high}", param=field)


def _check_float_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{field} is {value}: it must be {low:g} to {high:g}", param=field)


def _limit_reason(bounds: ModelBounds) -> str:
    if bounds.cache_tokens < bounds.max_model_len:
        return f"the cache holds {bounds.cache_tokens} tokens: raise --kv-memory"
    return "raise --max-model-len if the model allows it"
