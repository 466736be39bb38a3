"""What becomes of a source file: definitions, documented names, conversations."""

import textwrap

from tools.demo_model.chat import BOS, EOS
from tools.demo_model.conversations import ROUNDS, conversations
from tools.demo_model.definitions import Documented, documented, first_sentences, snippets
from tools.demo_model.sources import Source

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


def source(text: str = TEXT, name: str = "pkg/things.py") -> Source:
    return Source(name, text, is_test=False, held_out=False)


def test_methods_are_snippets_of_their_own_with_their_decorators() -> None:
    found = list(snippets(source()))
    assert any(one.startswith("class Counter:\n") for one in found)
    assert any(one.startswith("@property\ndef total(self, start=0):\n    ") for one in found)
    assert all(one.endswith("\n") and not one.endswith("\n\n") for one in found)


def test_public_names_with_the_first_paragraph_on_one_line() -> None:
    assert list(documented(source())) == [
        Documented("module", "pkg.things", "pkg.things", "", "Things that are counted."),
        Documented("class", "pkg.things", "pkg.things.Counter", "", "Counts what is passed to it."),
        Documented(
            "function", "pkg.things", "pkg.things.Counter.total", "(self, start=0)", "Return what was counted so far."
        ),
        Documented(
            "function",
            "pkg.things",
            "pkg.things.wait",
            "(seconds, *, loop=None)",
            "Wait for so many seconds. Then return.",
        ),
    ]


def test_private_modules_and_broken_files_have_nothing_to_say() -> None:
    assert list(documented(source(name="pkg/_things.py"))) == []
    assert list(documented(source("def broken(:\n"))) == []
    assert list(snippets(source("def broken(:\n"))) == []


def test_a_package_is_named_as_its_folder() -> None:
    assert source(name="json/__init__.py").module == "json"


def test_sentences() -> None:
    assert first_sentences("Two words") == ""
    assert first_sentences("f(x) -> int\n\nReturn the number of x") == "Return the number of x."
    long = "This is a sentence. " * 40
    assert first_sentences(long).endswith("sentence.")
    assert len(first_sentences(long)) <= 400
    assert first_sentences(textwrap.dedent("  >>> example\n")) == ""


def test_every_name_is_asked_about_and_turns_alternate() -> None:
    names = [Documented("function", "m", f"m.f{i}", "", f"Says the number {i}.") for i in range(20)]
    told = list(conversations(names, 1))
    whole = "".join(told)
    for i in range(20):
        answers = whole.count(f"Says the number {i}.") + whole.count(f"from m import f{i}{EOS}")
        assert answers == ROUNDS, i
    for one in told:
        assert one.startswith((BOS + "<|user|>", BOS + "<|system|>"))
        assert one.endswith(EOS)
        assert one.count("<|user|>") == one.count("<|assistant|>") == one.count(EOS)
    assert list(conversations(names, 1)) == told
    assert list(conversations(names, 2)) != told
