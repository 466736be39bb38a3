"""The log probabilities of prompts in responses (`prompt_logprobs`), in the form of vLLM."""

from typing import Any

import msgspec

from baton.types import TokenLogprobs
from coordinator.frontend.http.responses.sse import encode_json
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for the logarithm of zero, which JSON cannot represent


class PromptLogprob(msgspec.Struct):
    """A token in the place of a prompt token; `rank` is null if it is none of the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of a prompt, tokens in its place by id; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class PromptLogprobsBuffer:
    """Collects the log probabilities of each prompt of a response that is not streamed.

    Each chunk is encoded when it arrives, because all of them together can be long.
    """

    def __init__(self, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._num_tokens = [0] * len(stream.prompt_token_ids)
        self._encoded: list[list[bytes]] = [[] for _ in stream.prompt_token_ids]

    def add_chunk(self, chunk: OutputChunk) -> None:
        """Add the `prompt_logprobs` of a chunk: those of the next tokens of its prompt."""
        stream = self._response_stream
        prompt_index = stream.choices[chunk.choice_index].prompt_index
        begin = self._num_tokens[prompt_index]
        end = self._num_tokens[prompt_index] = begin + len(chunk.prompt_logprobs)
        tokens = stream.prompt_token_ids[prompt_index][begin:end]
        entries = [
            None if score is None else _format_entry(stream.tokenizer, token, score)
            for token, score in zip(tokens, chunk.prompt_logprobs, strict=True)
        ]
        self._encoded[prompt_index].append(encode_json(entries)[1:-1])

    def get_prompt_logprobs(self, choice_index: int) -> Any:
        """Return the encoded `PromptLogprobs` of a choice, or UNSET if they were not asked for."""
        encoded = self._encoded[self._response_stream.choices[choice_index].prompt_index]
        return msgspec.Raw(b"[%b]" % b",".join(encoded)) if encoded else msgspec.UNSET


def _format_entry(
    tokenizer: Tokenizer, token: int, score: TokenLogprobs
) -> dict[int, PromptLogprob]:
    """Return the tokens by id: the prompt's own first, then the likeliest ones, best first."""
    own = PromptLogprob(max(score.logprob, MIN_LOGPROB), None, tokenizer.token_text(token))
    entry = {token: own}
    for rank, (candidate, logprob) in enumerate(score.top_logprobs, 1):
        text = tokenizer.token_text(candidate)
        entry[candidate] = PromptLogprob(max(logprob, MIN_LOGPROB), rank, text)
    return entry
