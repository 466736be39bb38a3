"""Names of modules written in C, from their docstrings, because they have no source to read."""

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES

from tools.demo_model.corpus.definitions import DocumentedName, first_sentences


def list_builtin_names() -> Iterator[DocumentedName]:
    """Return the names of `builtins`, without a prefix, and of the public C modules."""
    for name in ("builtins", *sorted(sys.stdlib_module_names)):
        if name.startswith("_") or not _is_written_in_c(name):
            continue
        module = importlib.import_module(name)
        if summary := first_sentences(module.__doc__ or ""):
            yield DocumentedName("module", name, name, "", summary)
        yield from _documented_members(
            module, name, "" if name == "builtins" else f"{name}.", depth=2
        )


def _is_written_in_c(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and (spec.origin or "").endswith(("built-in", *EXTENSION_SUFFIXES))


def _documented_members(
    parent: object, module: str, prefix: str, depth: int
) -> Iterator[DocumentedName]:
    for last, member in sorted(vars(parent).items()):
        if last.startswith("_") or isinstance(member, types.ModuleType | property):
            continue
        kind = "class" if inspect.isclass(member) else "function" if callable(member) else ""
        if not kind:
            continue
        if summary := first_sentences(inspect.getdoc(member) or ""):
            yield DocumentedName(
                kind,
                module,
                prefix + last,
                _argument_text(member) if kind == "function" else "",
                summary,
            )
        if inspect.isclass(member) and depth > 1:
            yield from _documented_members(member, module, f"{prefix}{last}.", depth - 1)


def _argument_text(member: object) -> str:
    try:
        return str(inspect.signature(member))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
