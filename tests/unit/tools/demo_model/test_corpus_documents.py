"""What becomes of a source file: definitions, documented names, conversations."""

import textwrap

from benchmarks.text.source_files import SourceFile
from tools.demo_model.common.chat_format import BOS, EOS
from tools.demo_model.corpus.conversations import ROUNDS_PER_NAME, generate_conversations
from tools.demo_model.corpus.definitions import (
    DocumentedName,
    first_sentences,
    list_documented_names,
    list_snippets,
)

TEXT = '''"""Things that are counted.

More of it.
"""


class Counter:
    """Counts what is
    passed to it."""

    @property
    def total(self, start=0):
        """Return what was counted so far."""
        return self._total + start

    def _hidden(self):
        """Says nothing to anybody."""


async def wait(seconds, *, loop=None):
    """Wait for so many seconds. Then return."""
'''


def source(text: str = TEXT, name: str = "pkg/things.py") -> SourceFile:
    return SourceFile(name, text, is_test=False, is_held_out=False)


def test_methods_are_snippets_of_their_own_with_their_decorators() -> None:
    found = list(list_snippets(source()))
    assert any(document.startswith("class Counter:\n") for document in found)
    assert any(
        document.startswith("@property\ndef total(self, start=0):\n    ") for document in found
    )
    assert all(document.endswith("\n") and not document.endswith("\n\n") for document in found)


def test_public_names_with_the_first_paragraph_on_one_line() -> None:
    assert list(list_documented_names(source())) == [
        DocumentedName("module", "pkg.things", "pkg.things", "", "Things that are counted."),
        DocumentedName(
            "class", "pkg.things", "pkg.things.Counter", "", "Counts what is passed to it."
        ),
        DocumentedName(
            "function",
            "pkg.things",
            "pkg.things.Counter.total",
            "(self, start=0)",
            "Return what was counted so far.",
        ),
        DocumentedName(
            "function",
            "pkg.things",
            "pkg.things.wait",
            "(seconds, *, loop=None)",
            "Wait for so many seconds. Then return.",
        ),
    ]


def test_private_modules_and_broken_files_have_nothing_to_say() -> None:
    assert list(list_documented_names(source(name="pkg/_things.py"))) == []
    assert list(list_documented_names(source("def broken(:\n"))) == []
    assert list(list_snippets(source("def broken(:\n"))) == []


def test_a_package_is_named_as_its_folder() -> None:
    assert source(name="json/__init__.py").module_name == "json"


def test_first_sentences() -> None:
    assert first_sentences("Two words") == ""
    assert first_sentences("f(x) -> int\n\nReturn the number of x") == "Return the number of x."
    long = "This is a sentence. " * 40
    assert first_sentences(long).endswith("sentence.")
    assert len(first_sentences(long)) <= 400
    assert first_sentences(textwrap.dedent("  >>> example\n")) == ""


def test_every_name_is_asked_about_and_turns_alternate() -> None:
    names = [
        DocumentedName("function", "m", f"m.f{i}", "", f"Says the number {i}.") for i in range(20)
    ]
    conversations = list(generate_conversations(names, 1))
    whole = "".join(conversations)
    for i in range(20):
        answers = whole.count(f"Says the number {i}.") + whole.count(f"from m import f{i}{EOS}")
        assert answers == ROUNDS_PER_NAME, i
    for conversation in conversations:
        assert conversation.startswith((BOS + "<|user|>", BOS + "<|system|>"))
        assert conversation.endswith(EOS)
        assert (
            conversation.count("<|user|>")
            == conversation.count("<|assistant|>")
            == conversation.count(EOS)
        )
    assert list(generate_conversations(names, 1)) == conversations
    assert list(generate_conversations(names, 2)) != conversations
