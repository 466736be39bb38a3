"""Reading a tokenizer for grammars: the sizes that it gets, and how often the file is parsed."""

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from baton.errors import ConfigError
from baton.structured_output import grammar_compiler
from baton.structured_output.grammar_compiler import load_grammar_tokenizer
from tests.small_tokenizers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(byte_level_tokenizer().to_str())
    return file


@pytest.mark.parametrize(
    ("vocab_size", "end_tokens", "expected"),
    [
        (0, (), (None, [0])),
        (400, (), (400, [0])),
        (400, (5, 6), (400, [5, 6])),
        (100, (5,), (None, [5])),  # fewer logits than tokens
    ],
)
def test_a_tokenizer_has_the_size_of_the_model_and_its_ends(
    tokenizer_file: Path,
    vocab_size: int,
    end_tokens: tuple[int, ...],
    expected: tuple[int | None, list[int]],
) -> None:
    size, ends = expected
    found = load_grammar_tokenizer(tokenizer_file, vocab_size, end_tokens)
    assert found.vocab_size == (size or byte_level_tokenizer().get_vocab_size())
    assert found.eos_tokens == ends


def test_a_start_parses_the_tokenizer_once(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes half a second of a large vocabulary, in which Python's lock is held."""
    parsed = []

    def parse(*arguments: Any, **options: Any) -> LLTokenizer:
        parsed.append(options)
        return LLTokenizer(*arguments, **options)

    monkeypatch.setattr(grammar_compiler, "LLTokenizer", parse)
    load_grammar_tokenizer(tokenizer_file, 400, (5, 6))
    load_grammar_tokenizer(tokenizer_file)
    assert len(parsed) == 2


@pytest.mark.parametrize("text", ["", "{}", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read for structured output"):
        load_grammar_tokenizer(file, 400)


def test_an_end_of_text_beyond_the_tokenizer_is_an_error(tokenizer_file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read for structured output"):
        load_grammar_tokenizer(tokenizer_file, 400, (399,))
