"""The sampling parameters of the Python API, with vLLM's names and defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from baton.errors import InvalidRequest

# Fields that reach a request in another form than under their own name; see request_bodies.py.
_TRANSLATED = frozenset({"logprobs", "logit_bias", "extra_body"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Values are checked by the cluster or engine that serves the request.

    A value that is given here takes the place of the model's own default (generation_config.json),
    and so does each default here: `LLM.generate` without any SamplingParams takes the model's.
    """

    n: int = 1  # answers to one prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 and -1 are off
    min_p: float = 0.0  # 0 is off
    seed: int | None = None  # None: a random one for each prompt
    # None: what the context has room for; of a conversation, the model's own default if it has one.
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None  # the answer ends before the first that occurs
    stop_token_ids: Sequence[int] | None = None  # the answer ends with the first that is drawn
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None  # by token id
    logprobs: int | None = None  # likeliest tokens to report at each place of the output
    prompt_logprobs: int | None = None  # likewise of the prompt
    # What the output has to be: one of json, regex, choice, grammar, json_object, structural_tag.
    structured_outputs: Mapping[str, Any] | None = None
    # More fields of the request's body, as the HTTP API names them; they override the others.
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def to_body(self) -> dict[str, Any]:
        """Return the fields of a request that have the same name and form there."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        body = {
            name: value
            for name, value in values.items()
            if value is not None and name not in _TRANSLATED
        }
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return body


def pair_with_prompts(
    given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    """Return the parameters of each prompt. Raises InvalidRequest.

    `given` are those of all prompts, those of each, or None for the model's defaults.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(
        isinstance(each, SamplingParams) for each in given
    ):
        raise InvalidRequest(
            f"sampling_params is a {type(given).__name__}: it must be one SamplingParams, or a list"
            " with one for each prompt",
            param="sampling_params",
        )
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"sampling_params has {len(given)} entries for {num_prompts} prompts: give one for"
            " each, or one for all",
            param="sampling_params",
        )
    return list(given)
