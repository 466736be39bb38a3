"""Finds stop strings across token boundaries, with one Knuth-Morris-Pratt automaton for each.

The result does not depend on how the text is cut into steps: it is the match that ends first, and
of those that end together, the longest.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """Searches a text for several stop strings, fed piece by piece."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_KmpAutomaton(string) for string in strings]
        self._fed_characters = 0
        # How many of the last characters may be the beginning of a stop string: not to be emitted.
        self.held_characters = 0

    def skip_characters(self, characters: int) -> None:
        """Advance the position without searching."""
        self._fed_characters += characters

    def feed_text(self, text: str) -> int | None:
        """Return where a stop string begins that is now complete, or None.

        The position counts all characters fed and skipped.
        """
        for character in text:
            self._fed_characters += 1
            complete = [
                automaton.length
                for automaton in self._automata
                if automaton.feed_character(character)
            ]
            if complete:
                self.held_characters = 0
                return self._fed_characters - max(complete)
        self.held_characters = max(
            (automaton.matched_length for automaton in self._automata), default=0
        )
        return None


class _KmpAutomaton:
    """Matches one string. Knuth, Morris, Pratt: Fast Pattern Matching in Strings (1977)."""

    def __init__(self, string: str) -> None:
        self._string = string
        self.length = len(string)
        self.matched_length = 0  # length of the longest prefix of the string that ends the text
        self._fallback = _prefix_function(string)

    def feed_character(self, character: str) -> bool:
        matched = self.matched_length
        while matched and self._string[matched] != character:
            matched = self._fallback[matched]
        self.matched_length = matched + (self._string[matched] == character)
        return self.matched_length == self.length


def _prefix_function(string: str) -> list[int]:
    """For each prefix length, the length of its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length]
        length += string[length] == character
        borders.append(length)
    return borders
