"""Stop strings found over token boundaries: one Knuth-Morris-Pratt automaton for each, fed
character by character.

So what is found does not depend on how the text is cut into steps: the match that ends first, and
of those that end together the longest.
"""

from collections.abc import Sequence


class StopStringMatcher:
    """`held_characters` is how many of the last characters could be the beginning of a stop string:
    they must not be shown yet."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_KmpAutomaton(string) for string in strings]
        self._fed_characters = 0
        self.held_characters = 0

    def skip_characters(self, characters: int) -> None:
        """So many characters go by unsearched."""
        self._fed_characters += characters

    def feed_text(self, text: str) -> int | None:
        """The position, counted over everything added and skipped, where a stop string begins that
        is now complete."""
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
    """`matched_length` is the length of the longest prefix of the string that the text ends
    with."""

    def __init__(self, string: str) -> None:
        self._string = string
        self.length = len(string)
        self.matched_length = 0
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
