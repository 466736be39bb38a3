"""Stage `prepare`: turn the standard library into token ids."""

import argparse
import importlib
import platform
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.text.source_files import (
    SourceFile,
    collect_sources,
    standard_library_folder,
)
from tools.demo_model.common import bpe_tokenizer as tokenizer
from tools.demo_model.common import corpus_files as corpus
from tools.demo_model.common.chat_format import BOS, EOS, SPECIAL_TOKENS
from tools.demo_model.common.progress_bar import ProgressBar
from tools.demo_model.corpus.builtin_names import list_builtin_names
from tools.demo_model.corpus.conversations import generate_conversations
from tools.demo_model.corpus.definitions import list_documented_names, list_snippets

DEFAULT_VOCABULARY = 4096
SEED = 0
_ENCODE_BATCH = 200  # documents encoded at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path(".demo/corpus"), help="folder to write")
    parser.add_argument("--vocabulary", type=int, default=DEFAULT_VOCABULARY)
    parser.add_argument("--files", type=int, default=None, help="only so many files, for a trial")


def run(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.data
    folder.mkdir(parents=True, exist_ok=True)
    files = _read_sources(arguments.files)
    parts = dict(_build_parts(files))
    texts = [
        _strip_special_tokens(document)
        for name in ("library", "tests", "prose", "chat")
        for document in parts[name]
    ]
    print(f"training a tokenizer on {sum(map(len, texts)) / 1e6:.1f} M characters")
    trained = tokenizer.train_tokenizer(texts, arguments.vocabulary)
    trained.save(str(folder / tokenizer.TOKENIZER_FILE))
    facts = corpus.CorpusFacts(platform.python_version(), trained.get_vocab_size())
    for kind in ("library", "tests"):
        facts.files[kind] = sum(file.is_test == (kind == "tests") for file in files)
    for name, documents in parts.items():
        tokens = _encode_part(trained, name, documents)
        corpus.save_tokens(folder, name, tokens)
        facts.documents[name] = len(documents)
        facts.utf8_bytes[name] = sum(
            len(_strip_special_tokens(document).encode()) for document in documents
        )
        facts.tokens[name] = len(tokens)
        print(
            f"{name}: {len(documents)} documents, {facts.utf8_bytes[name] / 1e6:.2f} MB, "
            f"{len(tokens)} tokens"
        )
    corpus.save_facts(folder, facts)


def _read_sources(limit: int | None) -> list[SourceFile]:
    files = list(collect_sources(standard_library_folder()))
    if limit is not None:
        random.Random(SEED).shuffle(files)
        del files[limit:]
    return files


def _build_parts(files: Sequence[SourceFile]) -> Iterator[tuple[str, list[str]]]:
    """Yield documents by part; `held_out_` parts are from files that no other part contains."""
    for held_out, prefix in ((False, ""), (True, "held_out_")):
        chosen = [file for file in files if file.is_held_out == held_out]
        yield f"{prefix}library", [_to_document(file.text) for file in chosen if not file.is_test]
        yield f"{prefix}tests", [_to_document(file.text) for file in chosen if file.is_test]
        names = [
            name for file in chosen if not file.is_test for name in list_documented_names(file)
        ]
        if not held_out:
            names += list_builtin_names()
        yield f"{prefix}chat", list(generate_conversations(names, SEED))
        if not held_out:
            unique = dict.fromkeys(
                text for file in chosen if not file.is_test for text in list_snippets(file)
            )
            shuffled = [_to_document(text) for text in unique]
            random.Random(SEED).shuffle(shuffled)
            yield "definitions", shuffled
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
            yield (
                "prose",
                [_to_document(text.strip("\n") + "\n") for _, text in sorted(topics.items())],
            )


def _to_document(text: str) -> str:
    return BOS + text + EOS


def _strip_special_tokens(document: str) -> str:
    for token in SPECIAL_TOKENS:
        document = document.replace(token, "")
    return document


def _encode_part(trained: Tokenizer, name: str, documents: Sequence[str]) -> corpus.TokenArray:
    ids: list[int] = []
    with ProgressBar(f"encoding {name}") as progress:
        for start in range(0, len(documents), _ENCODE_BATCH):
            batch = trained.encode_batch(
                list(documents[start : start + _ENCODE_BATCH]), add_special_tokens=False
            )
            for encoding in batch:
                ids.extend(encoding.ids)
            progress.show_progress(min(1.0, (start + _ENCODE_BATCH) / len(documents)))
    return np.asarray(ids, dtype=np.uint16)
