"""Finds a tag in a text that arrives in pieces."""


class TagFinder:
    """Finds the first occurrence of one tag."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._held = ""  # the end of the text so far, if it may be the beginning of the tag

    def feed_text(self, text: str) -> tuple[str, str | None]:
        """Return text that is before the tag, and what follows it, or None until it is complete."""
        text = self._held + text
        before, tag, after = text.partition(self._tag)
        if tag:
            self._held = ""
            return before, after
        kept = len(text) - _overlap(text, self._tag)
        self._held = text[kept:]
        return text[:kept], None

    def flush(self) -> str:
        """Return the text that is held back: no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text that begins the tag, but is shorter."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
