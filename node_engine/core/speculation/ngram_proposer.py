"""Proposes draft tokens from the sequence itself (prompt lookup): no model, and no state to move.

The last tokens of a sequence are searched for in the prompt and the output before them. Where the
longest run of them occurred, what followed is the draft:

    ... a b c d e f ...... a b c | d e f       the draft is "d e f"

A run that overlaps the end goes on with itself, so that a loop is drafted at any length. Saxena,
"Prompt Lookup Decoding" (2023), describes the method, and Yang et al., "Inference with Reference:
Lossless Acceleration of Large Language Models" (2023), the copying that it rests on.
"""

from collections.abc import Sequence

MIN_MATCH_TOKENS = 2  # shorter runs recur by chance
MAX_MATCH_TOKENS = 16  # longer runs are not told apart
MAX_CANDIDATES = 8  # of a look-up, the latest first
MAX_INDEXED_TOKENS = 4096  # in one call, so that a long prompt delays no step

_NO_POSITION = -1


class NgramProposer:
    """Proposes how a sequence goes on. The work of a call is bounded, whatever the length."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """The owner of `tokens` may append to it, and changes nothing else of it."""
        self._tokens = tokens
        # Positions that follow an occurrence of two tokens: the latest one for each two tokens, and
        # for each position the one before with the same two tokens.
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = [_NO_POSITION] * MIN_MATCH_TOKENS

    def propose_tokens(self, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens; none if the last tokens did not occur before."""
        self._index_tokens()
        start = self._find_continuation()
        if start is None or max_tokens < 1:
            return []
        tokens = self._tokens
        period = len(tokens) - start
        return [tokens[start + offset % period] for offset in range(max_tokens)]

    def _index_tokens(self) -> None:
        """Index positions in order, up to the last token: it follows the two before it."""
        tokens, first = self._tokens, len(self._earlier)
        for position in range(first, min(len(tokens), first + MAX_INDEXED_TOKENS)):
            key = _make_key(tokens[position - 2], tokens[position - 1])
            self._earlier.append(self._latest.get(key, _NO_POSITION))
            self._latest[key] = position

    def _find_continuation(self) -> int | None:
        """The position after the longest match of the last tokens; of equals the latest."""
        tokens = self._tokens
        if len(tokens) < MIN_MATCH_TOKENS:
            return None
        position = self._latest.get(_make_key(tokens[-2], tokens[-1]), _NO_POSITION)
        best, best_length = None, 0
        for _ in range(MAX_CANDIDATES):
            if position == _NO_POSITION:
                break
            length = self._count_matching_tokens(position)
            if length > best_length:
                best, best_length = position, length
            if length == MAX_MATCH_TOKENS:
                break
            position = self._earlier[position]
        return best

    def _count_matching_tokens(self, position: int) -> int:
        """How many tokens before `position` are the last tokens of the sequence."""
        tokens, end = self._tokens, len(self._tokens)
        longest = min(position, MAX_MATCH_TOKENS)
        for length in range(MIN_MATCH_TOKENS, longest):
            if tokens[position - 1 - length] != tokens[end - 1 - length]:
                return length
        return longest


def _make_key(first: int, second: int) -> int:
    """One number for two token ids, which takes less memory than a pair."""
    return first << 32 | second
