"""Encodes the prompts of a request within the bounds of the model."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager

from baton import limits
from baton.limits import ModelBounds, TextLimit
from coordinator.frontend.output import PromptEcho
from coordinator.frontend.request import GenerationRequest, Prompt, rename_error_params
from coordinator.text.chat_template import ChatPrompt
from coordinator.text.tokenizer import Tokenizer


async def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt | ChatPrompt],
    request: GenerationRequest,
    bounds: ModelBounds,
) -> list[tuple[int, ...]]:
    """Encode prompts one after another, so that other requests run between two of them.

    Raises InvalidRequest, ContextLengthExceeded or Overloaded.
    """
    truncation = request.truncation
    limit = limits.get_prompt_limit(bounds)
    if truncation is not None:
        limit = limits.get_tokenize_limit(bounds)
    encoded: list[tuple[int, ...]] = []
    for index, prompt in enumerate(prompts):
        with name_prompt_in_errors(index, prompts):
            if not isinstance(prompt, str | ChatPrompt):
                if truncation is None:
                    limits.check_prompt_length(len(prompt), bounds)
                else:
                    limit.check_token_count(len(prompt))
            tokens = await _encode_prompt(tokenizer, prompt, limit)
            if truncation is not None:
                tokens = truncation.truncate_prompt(tokens, request.reserved_output_tokens, bounds)
            # Checked here, before any time is spent on the other prompts.
            limits.check_prompt_length(len(tokens), bounds)
            encoded.append(tokens)
        await asyncio.sleep(0)
    return encoded


def check_prompt_scoring(request: GenerationRequest, encoded: Sequence[tuple[int, ...]]) -> None:
    """Raise InvalidRequest for more log probabilities of prompts than an answer may have."""
    asked = {
        "logprobs": request.logprobs if request.echo else None,
        "prompt_logprobs": request.prompt_logprobs,
    }
    tokens = sum(map(len, encoded))
    for field, alternatives in asked.items():
        if alternatives is not None:
            limits.check_prompt_logprobs(field, alternatives, tokens, request.n)


async def build_prompt_echoes(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt | ChatPrompt],
    encoded: Sequence[tuple[int, ...]],
    request: GenerationRequest,
) -> list[PromptEcho]:
    """Return the prompts if they are part of the answer, with offsets if they are scored."""
    if not request.echo:
        return []
    with_offsets = request.logprobs is not None
    return [
        await _build_prompt_echo(tokenizer, prompt, tokens, with_offsets=with_offsets)
        for prompt, tokens in zip(
            prompts if request.truncation is None else encoded, encoded, strict=True
        )
    ]


async def encode_for_client(
    tokenizer: Tokenizer,
    prompt: Prompt | ChatPrompt,
    bounds: ModelBounds,
    add_special_tokens: bool | None,
) -> tuple[int, ...]:
    """Encode a prompt that is not generated from, which may be longer than the context."""
    limit = limits.get_tokenize_limit(bounds)
    return await _encode_prompt(tokenizer, prompt, limit, add_special_tokens=add_special_tokens)


def check_client_tokens(tokens: Sequence[int], bounds: ModelBounds) -> None:
    """Check tokens that a client wants the text of.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    with rename_error_params({"prompt": "tokens"}):
        limits.get_tokenize_limit(bounds).check_token_count(len(tokens))
    limits.check_token_ids("tokens", tokens, bounds)


def name_prompt_in_errors(index: int, prompts: Sequence[object]) -> AbstractContextManager[None]:
    """Make errors of the block say which of several prompts they are about."""
    return rename_error_params({"prompt": f"prompt[{index}]"} if len(prompts) > 1 else {})


async def _encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt | ChatPrompt,
    limit: TextLimit,
    *,
    add_special_tokens: bool | None = None,
) -> tuple[int, ...]:
    """By default, special tokens are added to a text, but not to a conversation.

    A chat template writes them itself.
    """
    if isinstance(prompt, ChatPrompt):
        return await tokenizer.encode_chat(
            prompt, add_special_tokens=bool(add_special_tokens), limit=limit
        )
    if isinstance(prompt, str):
        return await tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens is not False, limit=limit
        )
    return tuple(prompt)


async def _build_prompt_echo(
    tokenizer: Tokenizer,
    prompt: Prompt | ChatPrompt,
    tokens: tuple[int, ...],
    *,
    with_offsets: bool,
) -> PromptEcho:
    """`with_offsets` asks for where each token begins in the text."""
    if isinstance(prompt, str):
        offsets = await tokenizer.compute_token_offsets(prompt) if with_offsets else ()
        return PromptEcho(prompt, offsets)
    return PromptEcho(*await tokenizer.decode_with_offsets(tokens))
