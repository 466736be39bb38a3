"""Stands in for a GrammarChecker."""

from baton.errors import InvalidRequest
from baton.types import StructuredOutput

REFUSED_GRAMMAR = "refused"  # text of a grammar


async def check_fake_grammar(grammar: StructuredOutput) -> StructuredOutput:
    """Accept every grammar but one."""
    if grammar.text == REFUSED_GRAMMAR:
        raise InvalidRequest("structured_output: it is refused", param="structured_output")
    return grammar
