"""Loading and encoding."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from baton.errors import ConfigError, InvalidRequest
from coordinator import tokenizer_files as tokenizer
from coordinator.text_workers import INLINE_BYTES
from coordinator.tokenizer import HfTokenizer
from tests.integration.front_text import EOS, byte_level


def with_bos() -> HfTokenizer:
    """Token 0 begins every encoding."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    return HfTokenizer(backend, bos=0)


async def test_special_tokens_are_added_as_configured_but_bos_never_twice() -> None:
    plain = byte_level().encode("hello").ids
    text = with_bos()
    assert await text.encode("hello") == (0, *plain)
    assert await text.encode(f"{EOS}hello") == (0, *plain)
    assert await text.encode("") == (0,)
    assert await HfTokenizer(byte_level(), bos=0).encode(f"{EOS}hello") == (0, *plain)


async def test_truncation_and_padding_of_the_files_are_ignored() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(await HfTokenizer(backend, bos=None).encode("abcdefgh" * 4)) == len(
        byte_level().encode("abcdefgh" * 4).ids
    )


async def test_long_prompts_encode_the_same_off_the_loop() -> None:
    prompt = "hello wörld 😀 " * (INLINE_BYTES // 4)
    assert await HfTokenizer(byte_level(), bos=None).encode(prompt) == tuple(byte_level().encode(prompt).ids)


@pytest.mark.parametrize(("model", "engine", "told"), [("", "model", "the model has no"), ("x", "paced", "the paced")])
async def test_without_a_tokenizer_text_is_refused_for_a_reason(model: str, engine: str, told: str) -> None:
    text = await tokenizer.load(model, engine)
    with pytest.raises(InvalidRequest, match=f"prompt is text, but {told}.*send token ids"):
        await text.encode("hello")
    detokenizer = text.detokenizer()
    assert (detokenizer.add([1, 2]), detokenizer.flush()) == ("", "")


async def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"{tmp_path.name} has no tokenizer files"):
        await (await tokenizer.load(str(tmp_path), "model")).encode("hello")


async def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "{EOS}", "clean_up_tokenization_spaces": false}}'
    )
    text = await tokenizer.load(str(tmp_path), "model")
    ids = await text.encode("hello wörld")
    assert ids == tuple(byte_level().encode("hello wörld").ids)
    detokenizer = text.detokenizer()
    assert detokenizer.add(ids) + detokenizer.flush() == "hello wörld"


async def test_broken_files_are_a_start_up_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await tokenizer.load(str(tmp_path), "model")


async def test_remote_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ConfigError):
        await tokenizer.load(str(tmp_path), "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("nested", [False, True])
async def test_a_token_starts_with_its_space_whatever_the_files_say(nested: bool) -> None:
    """Some files trim spaces off the places of tokens; text that is cut there would lose them."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    trimming = processors.ByteLevel(trim_offsets=True)
    backend.post_processor = processors.Sequence([trimming]) if nested else trimming
    text, prompt = HfTokenizer(backend, bos=None), "hello  wörld\n\n\thello"
    starts = [*await text.starts(prompt), len(prompt)]
    cut = [prompt[begin:end] for begin, end in itertools.pairwise(starts)]
    assert cut == [text.token_text(token) for token in await text.encode(prompt)]


async def test_what_stands_for_no_text_begins_where_it_stands() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.post_processor = processors.TemplateProcessing(single=f"{EOS} $A {EOS}", special_tokens=[(EOS, 0)])
    starts = await HfTokenizer(backend, bos=None).starts("hello a")
    assert (starts[0], starts[1], starts[-1]) == (0, 0, len("hello a"))


async def test_long_lists_of_tokens_are_looked_up_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    text, loop, moved = HfTokenizer(byte_level(), bos=None), asyncio.get_running_loop(), 0
    run = loop.run_in_executor

    def counted(*arguments: Any) -> Any:
        nonlocal moved
        moved += 1
        return run(*arguments)

    monkeypatch.setattr(loop, "run_in_executor", counted)
    ids = await text.encode("hello")
    assert await text.pieces(ids) == byte_level().encode("hello").tokens
    assert moved == 0
    assert len(await text.pieces(ids * (INLINE_TOKENS + 1))) == len(ids) * (INLINE_TOKENS + 1)
    assert moved == 1
