"""`python -m tools.vocabulary_draw`: a random sample of the product's vocabulary.

It draws first lines of public docstrings, each after the name of what it documents, public names
and log lines. Somebody who knows the field, but not this code, should understand nearly all of them
without opening another file: `--context` shows what stands around each of them in its own file, the
definitions that enclose it with their docstrings and the lines next to it. The commit's hash seeds
the draw, so that anyone can repeat it and nobody can choose it.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "baton",
    "coordinator",
    "decode_node",
    "kernels",
    "kv_pool",
    "kv_transfer",
    "node_engine",
    "offline",
    "prefill_node",
)
SAMPLE_SIZE = 20  # of each kind
LINES_BEFORE, LINES_AFTER = 4, 8  # of an item, in its context
KINDS = ("docstring", "name", "log line")
_LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, order=True)
class VocabularyItem:
    """One entry of the sample."""

    kind: str  # one of KINDS
    text: str  # what a reader is shown
    path: str  # of the file, relative to the repository
    line: int


def collect_items(path: str, source: str) -> Iterator[VocabularyItem]:
    """Everything in one source file that may be drawn."""
    tree = ast.parse(source)
    yield from _docstring(tree, "module", path)
    yield from _definitions(tree, path, owner="")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (text := _log_line(node)):
            yield VocabularyItem("log line", text, path, node.lineno)


def _definitions(parent: ast.AST, path: str, owner: str) -> Iterator[VocabularyItem]:
    """Public classes and functions below `parent`, with their fields, parameters and docstrings."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            name = f"{owner}.{node.name}" if owner else node.name
            yield from _docstring(node, name, path)
            if isinstance(node, ast.ClassDef):
                yield VocabularyItem("name", f"class {name}", path, node.lineno)
                yield from _fields(node, path)
                yield from _definitions(node, path, owner=name)
            else:
                word = "method" if owner else "function"
                yield VocabularyItem("name", f"{word} {name}", path, node.lineno)
                yield from _parameters(node, name, path)


def _docstring(node: ast.Module | _Definition, owner: str, path: str) -> Iterator[VocabularyItem]:
    if text := ast.get_docstring(node):
        line = 1 if isinstance(node, ast.Module) else node.lineno
        yield VocabularyItem("docstring", f"{owner}: {_summary(text)}", path, line)


def _summary(docstring: str) -> str:
    """The sentences that begin in the first line."""
    lines = docstring.split("\n\n")[0].splitlines()
    summary = ""
    for sentence in re.split(r"(?<=[.?:;]) ", " ".join(line.strip() for line in lines)):
        if summary and len(summary) >= len(lines[0]):
            break
        summary += f" {sentence}" if summary else sentence
    return summary


def _fields(node: ast.ClassDef, path: str) -> Iterator[VocabularyItem]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if not item.target.id.startswith("_"):
                text = f"field {node.name}.{item.target.id}: {_type_text(item.annotation)}"
                yield VocabularyItem("name", text, path, item.lineno)


def _type_text(annotation: ast.expr) -> str:
    """The type of a field; of `Annotated` the type alone."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        if ast.unparse(annotation.value) == "Annotated":
            return ast.unparse(annotation.slice.elts[0])
    return ast.unparse(annotation).strip("'")


def _parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, path: str
) -> Iterator[VocabularyItem]:
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.arg not in ("self", "cls") and not argument.arg.startswith("_"):
            text = f"parameter {argument.arg} of {owner}"
            yield VocabularyItem("name", text, path, argument.lineno)


def _log_line(call: ast.Call) -> str:
    """The level, event and names of fields of a call that logs; "" for another call."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    method, arguments = call.func, call.args
    if method.attr == "log_event" and arguments and isinstance(arguments[0], ast.Attribute):
        method, arguments = arguments[0], arguments[1:]  # log_event(log.warning, "event", ...)
    is_logger = method.attr in _LOG_METHODS and "log" in ast.unparse(method.value)
    if not is_logger or not arguments or not isinstance(arguments[0], ast.Constant):
        return ""
    fields = ", ".join(keyword.arg for keyword in call.keywords if keyword.arg)
    return f"{method.attr}: {arguments[0].value!s}" + (f" ({fields})" if fields else "")


def read_sources(commit: str) -> dict[str, str]:
    """The product's Python files in a commit, by path."""
    archive = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
    sources = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            parts = Path(member.name).parts
            if member.name.endswith(".py") and parts[0] in PRODUCT and "pb" not in parts:
                content = files.extractfile(member)
                assert content is not None
                sources[member.name] = content.read().decode()
    return sources


def draw_sample(sources: dict[str, str], seed: str) -> list[VocabularyItem]:
    """SAMPLE_SIZE items of each kind with different texts; fewer if there are not so many."""
    items = sorted(item for path, source in sources.items() for item in collect_items(path, source))
    source_of_randomness = random.Random(seed)
    sample = []
    for kind in KINDS:
        by_text = {item.text: item for item in items if item.kind == kind}
        candidates = list(by_text.values())
        sample += source_of_randomness.sample(candidates, min(SAMPLE_SIZE, len(candidates)))
    return sample


def read_context(source: str, line: int) -> str:
    """The headers and docstrings of the definitions around a line, and the lines next to it."""
    lines = source.splitlines()
    shown: set[int] = set(
        range(max(1, line - LINES_BEFORE), min(len(lines), line + LINES_AFTER) + 1)
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module) or (
            isinstance(node, _Definition) and node.lineno <= line <= (node.end_lineno or 0)
        ):
            shown.update(_header_lines(node))
    context, last = [], 0
    for number in sorted(shown):
        if last and number > last + 1:
            context.append("        ...")
        context.append(f"        {lines[number - 1]}".rstrip())
        last = number
    return "\n".join(context)


def _header_lines(node: ast.Module | _Definition) -> range:
    """The numbers of the lines from `def` or `class` to the end of the docstring."""
    first, statement = getattr(node, "lineno", 1), node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    return range(first, (statement.end_lineno or 0) + 1 if has_docstring else statement.lineno)


def format_sample(
    sample: list[VocabularyItem], *, answers: bool, sources: Mapping[str, str] | None = None
) -> str:
    """A numbered list, under a title for each kind.

    `answers` adds where each item is from; `sources`, files by path, adds what stands around it.
    """
    lines = []
    for number, item in enumerate(sample, 1):
        if number == 1 or item.kind != sample[number - 2].kind:
            lines.append(f"\n{item.kind}s")
        origin = f"    [{item.path}:{item.line}]" if answers else ""
        lines.append(f"{number:3} {item.text}{origin}")
        if sources is not None:
            lines += [read_context(sources[item.path], item.line), ""]
    return "\n".join(lines).lstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.vocabulary_draw", description=__doc__)
    parser.add_argument("--commit", default="HEAD", help="draw from this commit, by its hash")
    parser.add_argument("--answers", action="store_true", help="say where each item is from")
    parser.add_argument("--context", action="store_true", help="show what stands around each item")
    options = parser.parse_args()
    command = ["git", "rev-parse", "--verify", f"{options.commit}^{{commit}}"]
    commit = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    sources = read_sources(commit)
    listing = format_sample(
        draw_sample(sources, commit),
        answers=options.answers,
        sources=sources if options.context else None,
    )
    sys.stdout.write(f"commit {commit}\n{listing}")


if __name__ == "__main__":
    main()
