"""Functions and classes of a source file as documents, and what their docstrings say."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.text.source_files import SourceFile, parse_python

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

MIN_SNIPPET_CHARACTERS = 60  # least characters of a definition that becomes a document
MAX_SNIPPET_CHARACTERS = 4000  # characters
MAX_SUMMARY_CHARACTERS = 400  # characters of a docstring's first paragraph


@dataclass(frozen=True, slots=True)
class DocumentedName:
    """A public name such as `textwrap.dedent`, with the first paragraph of its docstring."""

    kind: str  # "module", "class" or "function"
    module: str
    name: str
    arguments: str  # "(text)" for a function, else empty
    summary: str


def list_snippets(source: SourceFile) -> Iterator[str]:
    """Return each definition of the source, methods too, dedented."""
    lines = source.text.split("\n")
    tree = parse_python(source.text)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, Definition):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).strip("\n") + "\n"
            if MIN_SNIPPET_CHARACTERS <= len(text) <= MAX_SNIPPET_CHARACTERS and parse_python(text):
                yield text


def list_documented_names(source: SourceFile) -> Iterator[DocumentedName]:
    tree = parse_python(source.text)
    if tree is None or any(part.startswith("_") for part in source.module_name.split(".")):
        return
    if summary := _summary(tree):
        yield DocumentedName("module", source.module_name, source.module_name, "", summary)
    yield from _documented_members(tree, source.module_name, source.module_name)


def _documented_members(
    parent: ast.Module | ast.ClassDef, module: str, prefix: str
) -> Iterator[DocumentedName]:
    for node in parent.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        is_class = isinstance(node, ast.ClassDef)
        if summary := _summary(node):
            arguments = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield DocumentedName(
                "class" if is_class else "function", module, name, arguments, summary
            )
        if isinstance(node, ast.ClassDef):
            yield from _documented_members(node, module, name)


def _summary(node: ast.Module | Definition) -> str:
    return first_sentences(ast.get_docstring(node) or "")


def first_sentences(docstring: str) -> str:
    """Return the first paragraph of prose as one line, empty if none has a suitable length."""
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        text = " ".join(paragraph.split())
        if len(text) > MAX_SUMMARY_CHARACTERS:
            text = text[:MAX_SUMMARY_CHARACTERS].rpartition(". ")[0]
        if len(text.split()) >= 3 and text[0].isalpha() and "(" not in text.split()[0]:
            return text if text[-1] in ".!?:" else text + "."
    return ""
